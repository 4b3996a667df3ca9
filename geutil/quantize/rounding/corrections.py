"""Corrections of weights and biases: small numbers that are added to them.

Weights are rounded by a FakeQuant op. What is added before it decides to which side; 0
is to the nearest level. Weights themselves stay as they are, and so do other models
that read them; training goes on from where rounding left off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation, state
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.resource_variables import handle_in, variables_outside
from geutil.graph.types import Graph, Operation, Tensor
from geutil.quantize.planning.network import CORRECTION, Edge, uncorrected_input

Array = np.ndarray[Any, Any]

SUFFIX = "correction"


@dataclass(eq=False)
class Correction:
    """What is added to a tensor.

    Attributes:
        variable: the variable that holds it.
        read: the op that reads it.
    """

    variable: Any
    read: Operation

    def set(self, value: Array) -> None:
        """Set what is added."""
        shape = self.variable.shape.as_list()
        self.variable.assign(value.reshape(shape).astype(np.float32))


def reset(graph: Graph, variables: Mapping[str, Any]) -> None:
    """Set the corrections of a FuncGraph to zero.

    Args:
        graph: the graph.
        variables: its variables by name.
    """
    if all(uncorrected_input(op) is None for op in graph.get_operations()):
        return
    for name, variable in variables.items():
        if name.rpartition("/")[2] == SUFFIX:
            variable.assign(tf.zeros_like(variable))


def corrected(
    graph: Graph, edges: Sequence[tuple[str, list[Edge]]], variables: Mapping[str, Any]
) -> list[Correction]:
    """Add zero to tensors, in variables that can be set.

    Args:
        graph: the FuncGraph.
        edges: for each tensor a name, and the inputs of ops that shall read the sum.
        variables: the variables of the model by name.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.
    """
    found: list[Correction | None] = []
    new: list[tuple[str, Tensor]] = []
    for name, readers in edges:
        op, slot = readers[0]
        found.append(_existing(op.inputs[slot], f"{name}/{SUFFIX}", variables))
        if found[-1] is None:
            new.append((f"{name}/{SUFFIX}", op.inputs[slot]))
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


def _existing(
    tensor: Tensor, name: str, variables: Mapping[str, Any]
) -> Correction | None:
    """Return the correction that a tensor has."""
    if uncorrected_input(tensor.op) is None or name not in variables:
        return None
    return Correction(variables[name], tensor.op.inputs[1].op)


def _sum(edge: Edge, variable: Any) -> tuple[Correction, Tensor]:
    op, slot = edge
    tensor = op.inputs[slot]
    handle = handle_in(op.graph, variable)
    with creation.surroundings_of(op):
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        total = tf.raw_ops.AddV2(x=tensor, y=read, name="corrected")
    creation.set_mark(total.op, CORRECTION)
    return Correction(variable, read.op), total
