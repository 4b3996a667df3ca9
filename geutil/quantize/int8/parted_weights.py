"""Weights that several layers read, as weights of each.

TFLite's converter takes a FakeQuant op for a way to store values only if one op reads
it; weights that several layers share, or that are equal and so become one, it stores in
float, or in steps of its own (TensorFlow 2.21). Weights whose ranges differ by a
float32 rounding error are not equal. The file holds the integers once: see
`geutil.tflite.LiteFile.strip`.

Ranges of fewer than 8 bits it takes for ranges of 4 or 8, whose steps are finer. So
such weights are given as they are simulated, in a range of 8 bits with the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation
from geutil.graph.types import Graph, Operation
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.select.networks.provenance import Origins

Array = np.ndarray[Any, Any]

_ROUNDING = 2.0**-23
_BITS, _MOST = 8, 127.0


def part_weights(graph: Graph) -> None:
    """Let each reader of quantized weights have them in a range of its own."""
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
        weights = _Weights.of(op, [next(values) for _ in op.inputs])
        for reader, slot in _readers(op):
            count = uses.get(weights.key, 0)
            uses[weights.key] = count + 1
            if count or weights.are_changed:
                twin = weights.twin(op, reader, 1 + count * _ROUNDING)
                creation.set_new_input(reader, slot, twin)


@dataclass(frozen=True, eq=False)
class _Weights:
    """Weights and the range that they are stored in."""

    value: Array
    ends: tuple[Array, Array]
    bits: int
    are_changed: bool

    @classmethod
    def of(cls, op: Operation, values: Sequence[Array]) -> _Weights:
        """Return what a FakeQuant op quantizes, by the values of its inputs."""
        value, *given = values
        bits, narrow = (op.get_attr(name) for name in ("num_bits", "narrow_range"))
        low, high = given or (op.get_attr("min"), op.get_attr("max"))
        ends = np.asarray(low, np.float32), np.asarray(high, np.float32)
        if bits >= _BITS or not narrow:
            return cls(value, ends, bits, are_changed=False)
        with tf.init_scope():
            rounded = _simulation(op)(value, *ends, bits, narrow).numpy()
        # As large steps, of which 127 reach to the end.
        factor = np.float32(_MOST / (2.0 ** (bits - 1) - 1))
        wide = ends[0] * factor, ends[1] * factor
        return cls(rounded, wide, _BITS, are_changed=True)

    @property
    def key(self) -> Any:
        """Equal for weights that the converter takes for the same."""
        return self.value.shape, self.value.tobytes(), self.bits

    def twin(self, op: Operation, reader: Operation, wider: float) -> Any:
        """Return them quantized, in a range that is hardly wider."""
        low, high = (end * np.float32(wider) for end in self.ends)
        source = tf.constant(self.value) if self.are_changed else op.inputs[0]
        narrow = op.get_attr("narrow_range")
        # The file tells the layer by its name, but for digits.
        name = f"{reader.name}0"
        return _simulation(op)(source, low, high, self.bits, narrow, name=name)


def _simulation(op: Operation) -> Callable[..., Any]:
    """Return the function that makes FakeQuant ops of a kind."""
    if op.type.endswith("PerChannel"):
        return tf.quantization.fake_quant_with_min_max_vars_per_channel
    return tf.quantization.fake_quant_with_min_max_vars


def _readers(op: Operation) -> Iterator[tuple[Operation, int]]:
    """Yield what reads an op's result, and by which input."""
    (result,) = op.outputs
    for reader in list(dict.fromkeys(result.consumers())):
        for slot, tensor in enumerate(reader.inputs):
            if tensor is result:
                yield reader, slot
