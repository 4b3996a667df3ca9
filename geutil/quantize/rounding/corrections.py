"""Corrections of weights and biases: small numbers that are added to them.

Weights are rounded by a FakeQuant op. A correction before it decides the side; 0
is to the nearest level. Weights themselves stay as they are, and so do other models
that read them; training goes on from where rounding left off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation, functions, state, strategy_variables
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.resource_variables import handle_in, variables_outside
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.network import CORRECTION, Edge, uncorrected_input

Array = np.ndarray[Any, Any]

SUFFIX = "correction"


@dataclass(eq=False)
class Correction:
    """A number that is added to each element of a tensor."""

    variable: Any
    read: Operation

    def set(self, value: Array) -> None:
        """Set the correction."""
        shape = self.variable.shape.as_list()
        whole = strategy_variables.whole(self.variable)
        whole.assign(value.reshape(shape).astype(np.float32))


def corrections_of(
    graph: Graph, variables: Mapping[str, Any]
) -> dict[Operation, Correction]:
    """Return the corrections of a FuncGraph, by the ops that add them."""
    sums = [op for op in graph.get_operations() if uncorrected_input(op) is not None]
    outside = MutableIdentityMap(
        (inside, external) for external, inside in functions.bindings(graph)
    )
    by_handle = {
        id(strategy_variables.first_copy(v).handle): v for v in variables.values()
    }
    found = {}
    for op in sums:
        read = op.inputs[1].op
        variable = by_handle.get(id(outside.get(read.inputs[0])))
        if variable is not None:
            found[op] = Correction(variable, read)
    return found


@contextmanager
def cleared(graph: Graph, variables: Mapping[str, Any]) -> Iterator[None]:
    """Set the corrections of a FuncGraph to zero; put them back if the block raises."""
    corrections = corrections_of(graph, variables).values()
    before = [(each, each.variable.numpy()) for each in corrections]
    for correction, value in before:
        correction.set(np.zeros_like(value))
    try:
        yield
    except BaseException:
        for correction, value in before:
            correction.set(value)
        raise


def corrected(
    graph: Graph, edges: Sequence[tuple[str, list[Edge]]], variables: Mapping[str, Any]
) -> list[Correction]:
    """Add zero to tensors, in variables that can be set."""
    by_op = corrections_of(graph, variables)
    found = [by_op.get(_tensor(readers[0]).op) for _, readers in edges]
    new = [
        (f"{name}/{SUFFIX}", _tensor(readers[0]))
        for (name, readers), existing in zip(edges, found, strict=True)
        if existing is None
    ]
    state.check_editable(graph, [e.op for _, readers in edges for e in readers])
    made = iter(
        variables_outside(
            graph, [(n, np.zeros(t.shape.as_list(), np.float32)) for n, t in new]
        )
    )
    edits: list[InputEdit] = []
    corrections: list[Correction] = []
    for (_, readers), existing in zip(edges, found, strict=True):
        if existing is not None:
            corrections.append(existing)
            continue
        variable = next(made)
        correction, total = _sum(readers[0], variable)
        corrections.append(correction)
        edits += [InputEdit(edge.op, edge.slot, total) for edge in readers]
    state.renew_order(graph)
    apply_edits(graph, edits)
    return corrections


def _tensor(edge: Edge) -> Tensor:
    return edge.op.inputs[edge.slot]


def _sum(edge: Edge, variable: Any) -> tuple[Correction, Tensor]:
    op, tensor = edge.op, _tensor(edge)
    handle = handle_in(op.graph, variable)
    with creation.surroundings_of(op):
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        total = tf.raw_ops.AddV2(x=tensor, y=read, name="corrected")
    creation.set_mark(total.op, CORRECTION)
    return Correction(variable, read.op), total
