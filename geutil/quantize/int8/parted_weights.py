"""Weights that several layers read, as weights of each.

TFLite's converter takes a FakeQuant op for a way to store values only if one op reads
it; weights that several layers share, or that are equal and so become one, it stores in
float, or in steps of its own (TensorFlow 2.21). Weights whose ranges differ by a
float32 rounding error are not equal. The file holds the integers once: see
`geutil.tflite.LiteFile.strip`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation
from geutil.graph.types import Graph, Operation
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.select.networks.provenance import Origins

_ROUNDING = 2.0**-20


def part_weights(graph: Graph) -> None:
    """Let each reader of quantized weights have them in a range of its own.

    Args:
        graph: a copy of a graph, whose variables and ranges are constants; it is
            changed, and the caller is in it.

    Cost: linear in ops, and one run of what weights are computed from.
    """
    origins = Origins(graph)
    simulations = [
        op
        for op in graph.get_operations()
        if op.type in FAKE_QUANT and origins.is_parameter(op.inputs[0])
    ]
    inputs = [t for op in simulations for t in op.inputs]
    with tf.init_scope():
        values = iter(values_of(inputs))
    uses: dict[Any, int] = {}
    for op in simulations:
        value, *ends = (next(values) for _ in op.inputs)
        key = (value.shape, value.tobytes(), op.get_attr("num_bits"))
        for reader, slot in _readers(op):
            count = uses.get(key, 0)
            uses[key] = count + 1
            if count:
                twin = _twin(op, reader, ends, 1 + count * _ROUNDING)
                creation.set_new_input(reader, slot, twin)


def _readers(op: Operation) -> Iterator[tuple[Operation, int]]:
    """Yield what reads an op's result, and by which input."""
    (result,) = op.outputs
    for reader in list(dict.fromkeys(result.consumers())):
        for slot, tensor in enumerate(reader.inputs):
            if tensor is result:
                yield reader, slot


def _twin(op: Operation, reader: Operation, ends: list[Any], wider: float) -> Any:
    """Return the values of a FakeQuant op in a range that is hardly wider."""
    by_channel = op.type.endswith("PerChannel")
    simulate = (
        tf.quantization.fake_quant_with_min_max_vars_per_channel
        if by_channel
        else tf.quantization.fake_quant_with_min_max_vars
    )
    low, high = ends or (op.get_attr("min"), op.get_attr("max"))
    bits, narrow = (op.get_attr(name) for name in ("num_bits", "narrow_range"))
    # The file tells the layer by its name, but for digits.
    return simulate(
        op.inputs[0],
        np.float32(low) * np.float32(wider),
        np.float32(high) * np.float32(wider),
        bits,
        narrow,
        name=f"{reader.name}0",
    )
