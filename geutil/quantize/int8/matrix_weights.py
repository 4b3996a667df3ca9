"""Weights of matrices with a range for each channel.

TFLite's converter transposes a matrix and not the ranges of its columns along:
"'tfl.transpose' op has mismatched quantized axes" (TensorFlow 2.21). Of a constant
without a range it finds symmetric ranges of 8 bits for each channel itself, as wide as
the largest weight. Weights that were rounded in such ranges have one that is as large.
So they are given as the constants that the FakeQuant op makes of them, and stored as
they are simulated. Where a range is wider than its weights, the file's steps are
others, and `weight_layout` puts the simulated ones back.

A product of batches with a matrix that is not quantized gets data of 8 bits from it,
although it computes in float, and the file cannot be run: "input->type !=
kTfLiteFloat32" (TensorFlow 2.21). Behind a slice that takes all of the data, which is
dropped afterwards, it gets floats.

Before TensorFlow 2.17 the converter finds one range for the whole matrix, in which the
weights are rounded once more, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation
from geutil.graph.types import Graph, Operation
from geutil.quantize.calibration.ranges import (
    frozen,
    live_simulations,
    range_values,
    variable_values,
)
from geutil.quantize.int8.weight_layout import SteppedMatrix
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, PRODUCTS, version_of
from geutil.quantize.planning.network import forwarded_from
from geutil.quantize.spec import step
from geutil.select.networks.layers import Layer
from geutil.select.networks.provenance import Origins

_OF_BATCHES = PRODUCTS - {"MatMul"}
Array = np.ndarray[Any, Any]

_BITS, _MOST = 8, 127.0
_WITH_RANGE = 3

STORED_SINCE = (2, 17)
"""The first TensorFlow whose converter stores a range for each column."""


def simulated(
    graph: Graph, values: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return what FakeQuant ops make of matrices whose columns have a range each.

    Args:
        graph: a FuncGraph that is quantized.
        values: the values of ranges and variables, by the ops that read them.

    Cost: linear in the ops; one run of what such weights depend on.
    """
    ops = _simulations(graph)
    arrays = values_of([op.outputs[0] for op in ops], frozen(values))
    return dict(zip(ops, arrays, strict=True))


def matrices(graph: Graph) -> list[SteppedMatrix]:
    """Return the matrices whose columns have a range each, as they are simulated.

    Cost: linear in the ops; one run of what they depend on.
    """
    values = range_values(graph) | variable_values(graph)
    values |= computed_ranges(graph, values)
    array_by_op = simulated(graph, values)
    found = []
    for op, array in array_by_op.items():
        low, high = (values.get(t.op) for t in list(op.inputs)[1:])
        if low is not None and high is not None:
            bits, narrow = (op.get_attr(name) for name in ("num_bits", "narrow_range"))
            found.append(SteppedMatrix(array, step(low, high, bits, narrow)))
    return found


def computed_ranges(
    graph: Graph, values: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return the values of ranges of weights that are computed from these.

    A model that was trained has such: the weights' largest magnitudes of each step.

    Args:
        graph: a FuncGraph that is quantized.
        values: the values of ranges and variables, by the ops that read them.

    Cost: linear in the ops; one run of what such ranges depend on.
    """
    origins = Origins(graph)
    ends = [
        end
        for op in live_simulations(graph)
        if len(op.inputs) == _WITH_RANGE and origins.is_parameter(op.inputs[0])
        for end in list(op.inputs)[1:]
        if end.op not in values and tf.get_static_value(end) is None
        if origins.is_parameter(end)
    ]
    arrays = values_of(ends, frozen(values))
    return {end.op: array for end, array in zip(ends, arrays, strict=True)}


def with_fewer_bits(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of weights that have fewer than 8 bits, symmetric."""
    origins = Origins(graph)
    return [
        op
        for op in live_simulations(graph)
        if op.get_attr("num_bits") < _BITS and op.get_attr("narrow_range")
        if origins.is_parameter(op.inputs[0]) and len(op.inputs) == _WITH_RANGE
    ]


def in_8_bits(
    graph: Graph, values: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return ranges of weights that have as large steps in 8 bits as they have now.

    Args:
        graph: a FuncGraph that is quantized.
        values: the values of ranges, by the ops that read them.

    Cost: linear in the ops.
    """
    wider: dict[Operation, Array] = {}
    for op in with_fewer_bits(graph):
        factor = _MOST / (2.0 ** (op.get_attr("num_bits") - 1) - 1)
        for end in list(op.inputs)[1:]:
            value = values.get(end.op, tf.get_static_value(end))
            if value is not None:
                wider[end.op] = np.asarray(value * factor, np.float32)
    return wider


def stored_in_one_range(graph: Graph) -> list[Operation]:
    """Return those of which this TensorFlow's converter stores one range only."""
    too_old = version_of(tf.__version__) < STORED_SINCE
    return _simulations(graph) if too_old else []


def with_parted_data(graph: Graph, layers: Sequence[Layer]) -> None:
    """Let products in float read quantized data in a way that the converter gets right.

    Args:
        graph: a copy of a graph, which is changed; the caller is in it.
        layers: layers that are not quantized, in the graph that it is a copy of.
    """
    products = [layer for layer in layers if layer.op.type in _OF_BATCHES]
    op_by_name = {op.name: op for op in graph.get_operations()} if products else {}
    for layer in products:
        op = op_by_name.get(layer.op.name)
        data = None if op is None else op.inputs[layer.data]
        if data is None or not data.shape.rank:
            continue
        if forwarded_from(data).op.type in FAKE_QUANT:
            rank = data.shape.rank
            all_of_it = tf.slice(data, [0] * rank, [-1] * rank)
            creation.set_new_input(op, layer.data, all_of_it)


def _simulations(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of matrices whose columns have a range each."""
    origins = Origins(graph)
    return [
        op
        for op in graph.get_operations()
        if op.type == "FakeQuantWithMinMaxVarsPerChannel"
        and op.inputs[0].shape.rank == 2
        and origins.is_parameter(op.inputs[0])
    ]
