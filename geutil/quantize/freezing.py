"""What stands in for ops of a graph when ranges are no longer learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.calibration.sites import variable_behind
from geutil.quantize.copying import Replace
from geutil.quantize.finding.delays import delayed_input
from geutil.quantize.finding.kernels import FAKE_QUANT

Array = np.ndarray[Any, Any]


def range_values(graph: Graph) -> dict[Operation, Array]:
    """Return the values of ranges, by the ops that FakeQuant ops read them from."""
    ends = [
        end
        for op in graph.get_operations()
        if op.type in FAKE_QUANT
        for end in list(op.inputs)[1:]
    ]
    return _values(graph, ends)


def variable_values(graph: Graph) -> dict[Operation, Array]:
    """Return the values of variables, by the ops that read them."""
    ops = graph.get_operations()
    return _values(graph, [op.outputs[0] for op in ops if op.type == "ReadVariableOp"])


def frozen(values: Mapping[Operation, Array]) -> Replace:
    """Return what puts values in the place of ops, and leaves delays out."""

    def replace(op: Operation) -> Tensor | Array | None:
        found = values.get(op)
        if found is not None:
            return found
        return None if delayed_input(op) is None else op.inputs[1]

    return replace


def _values(graph: Graph, reads: list[Tensor]) -> dict[Operation, Array]:
    outside = MutableIdentityMap((inside, ext) for ext, inside in bindings(graph))
    found: dict[Operation, Array] = {}
    for read in reads:
        inside = variable_behind(read)
        handle = None if inside is None else outside.get(inside)
        if handle is not None and read.op not in found:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=read.dtype)
            found[read.op] = np.asarray(value.numpy())
    return found
