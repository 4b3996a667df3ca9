"""Rewrites of a quantized graph for TFLite's converter and the kernels of its files.

The converter writes the file of float kernels (TensorFlow 2.21), and goes wrong in
these places:

- It rounds the zero point of a range such as (-1, 1), in the middle between two
  integers, in float64, and FakeQuant ops in float32: they may end up at different
  ones. A range that was nudged as FakeQuant ops do has none such.
- A bias behind a Squeeze becomes part of the layer if it is a vector, not [1, C]; one
  number for all channels does not. A vector of that number whose last channel is larger
  by a float32 rounding error does.
- A product with one number, or a quotient by one, before a convolution becomes part of
  its weights, which keep the range that they had before: behind images that are scaled
  by 1/255 all weights are zeros. With a vector of that number it stays apart.
- Weights that several layers read, or that are equal, it stores in float, or in steps
  of its own: each reader gets a range that differs by a float32 rounding error. Ranges
  of fewer than 8 bits it takes for ranges of 4 or 8, whose steps are finer: such
  weights are given as they are simulated, in 8 bits with the same steps.
- It makes one kernel of a convolution between SpaceToBatchND and BatchToSpaceND where
  the batch is known, and else leaves three ops.

Two kernels are not used as they are: there is none for a quotient in integers, so it is
a product with a power, which is computed in float; and comparisons in int8 count in
units of 1/256 of a step of 1. With steps below that near values are the same, and with
steps of 1 or more the result is wrong. So both sides are scaled by a power of two.

The converter quantizes what lies between two ranges (TensorFlow 2.21). So ops that
`quantize` was told to skip carry a mark, and in what the converter is given values are
made complex and real again on each edge between these ops and others: that is the same,
the converter does not see it, and TFLite does so with floats only. In the file they go
on as they are.

Weights of transposed convolutions it stores in 8 bits all the same. They are inputs of
what it is given, and constants of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import tflite
from geutil.graph import creation, op_types
from geutil.graph.edits import Liveness
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import walk
from geutil.quantize.calibration.ranges import format_of_simulation, simulated_ends
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning import network
from geutil.quantize.planning.int8_kernels import COMPARISONS, DIVISIONS, FAKE_QUANT
from geutil.quantize.spec import Range, nudged, step, with_zero
from geutil.select.networks.layers import Origins, layer_of
from geutil.tflite import LiteFile, LiteGraph, LiteTensor
from geutil.tflite.parts import Array
from geutil.tflite.type_changes import set_end

_FINEST_COMPARED = 2.0**-5
"""Steps in which comparisons go wrong by an eighth of a step at most."""
_TRIED_SIZES = (61, 64, 66, 71)
"""Sizes that stand for unknown ones, in images that are large enough."""


@dataclass(frozen=True, eq=False)
class Dilated:
    """A convolution that equals a dilated one together with the ops around it."""

    spread: Operation
    convolution: Operation
    gathered: Operation
    rates: tuple[int, int]
    padding: tuple[tuple[int, int], ...]

    def amend(self, node: Any) -> None:
        """Let the node of a copy of the convolution be the dilated one."""
        node.attr["dilations"].list.i[:] = [1, *self.rates, 1]
        window = self.convolution.inputs[1].shape.as_list()[:2]
        totals = [(w - 1) * r for w, r in zip(window, self.rates, strict=True)]
        same = tuple((total // 2, total - total // 2) for total in totals)
        if not np.any(self.padding):
            node.attr["padding"].s = b"VALID"
        elif self.padding == same:
            node.attr["padding"].s = b"SAME"
        else:
            node.attr["padding"].s = b"EXPLICIT"
            ends = [end for pair in self.padding for end in pair]
            node.attr["explicit_paddings"].list.i[:] = [0, 0, *ends, 0, 0]


def find_dilated(graph: Graph) -> list[Dilated]:
    """Return the convolutions of a FuncGraph that are the same as dilated ones."""
    candidates = network.find_moved(graph.get_operations(), Liveness(graph))
    moved_convolutions = [each for each in candidates if _is_computed_from_shapes(each)]
    moves_by_size = [_moves(moved_convolutions, size) for size in _TRIED_SIZES]
    dilations = (
        _dilated(each, moves)
        for each, *moves in zip(moved_convolutions, *moves_by_size, strict=True)
    )
    return [dilated for dilated in dilations if dilated is not None]


def _is_computed_from_shapes(each: network.Moved) -> bool:
    def before(op: Operation) -> list[Operation]:
        return [] if op.type == "Shape" else [t.op for t in op.inputs]

    sources = walk((t.op for t in each.numbers), before)
    return not any(op.type.startswith("Placeholder") for op in sources)


def _moves(moved_convolutions: Sequence[network.Moved], size: int) -> list[list[Array]]:
    """Return the numbers of each, for images of a size where that is not known."""

    def replace(op: Operation) -> Array | None:
        if op.type != "Shape" or op.inputs[0].shape.rank is None:
            return None
        sizes = [size if n is None else n for n in op.inputs[0].shape.as_list()]
        return np.asarray(sizes, op.outputs[0].dtype.as_numpy_dtype)

    values = iter(
        values_of([t for each in moved_convolutions for t in each.numbers], replace)
    )
    return [[next(values) for _ in each.numbers] for each in moved_convolutions]


def _dilated(each: network.Moved, tried: Sequence[Sequence[Array]]) -> Dilated | None:
    """Return the dilated convolution if it is the same one for all sizes."""
    blocks = [b for before, _, after, _ in tried for b in (before, after)]
    paddings = [padding - crops for _, padding, _, crops in tried]
    first, padding = blocks[0].tolist(), paddings[0].tolist()
    same = all(b.tolist() == first for b in blocks)
    same = same and all(p.tolist() == padding for p in paddings)
    # Values cropped beyond the zeros would have to be cropped from the data.
    if not same or np.min(padding) < 0 or len(first) != (2 if each.axis is None else 1):
        return None
    if each.axis is not None:
        first.insert(each.axis - 1, 1)
        padding.insert(each.axis - 1, [0, 0])
    pairs = tuple((int(a), int(b)) for a, b in padding)
    return Dilated(
        each.spread, each.convolution, each.gathered, (first[0], first[1]), pairs
    )


def without_divisions(graph: Graph, results: Sequence[Tensor]) -> list[Tensor]:
    """Let divisions by data be products with a power, where they would be int8."""
    quotient_by_result: MutableIdentityMap[Tensor] = MutableIdentityMap()
    origins = Origins(graph)
    for op in graph.get_operations():
        divisor = DIVISIONS.get(op.type)
        if divisor is None or origins.is_parameter(op.inputs[divisor]):
            continue
        readers = op.outputs[0].consumers()
        if not any(_is_of_8_bits(reader) for reader in readers):
            continue
        quotient = tf.pow(
            op.inputs[divisor], tf.constant(-1.0), name=f"{op.name}/inverse"
        )
        if divisor:
            quotient = tf.multiply(op.inputs[0], quotient, name=f"{op.name}/quotient")
        quotient_by_result[op.outputs[0]] = quotient
        read_instead(readers, op.outputs[0], quotient)
    return [quotient_by_result.get(t, t) for t in results]


def _is_of_8_bits(op: Operation) -> bool:
    return op.type in FAKE_QUANT and op.get_attr("num_bits") == 8


def read_instead(ops: Sequence[Operation], tensor: Tensor, other: Tensor) -> None:
    """Let ops read another tensor in the place of one."""
    for op in ops:
        for index, t in enumerate(op.inputs):
            if t is tensor:
                creation.set_new_input(op, index, other)


def with_fitting_comparisons(graph: Graph) -> None:
    """Scale operands of a comparison in int8: the larger step is next to 1."""
    for op in graph.get_operations():
        if op.type not in COMPARISONS:
            continue
        sides = [_Side.of(t) for t in op.inputs]
        known_sides = [side for side in sides if side is not None]
        if len(known_sides) < len(sides) or not any(
            side.simulation and _is_of_8_bits(side.simulation) for side in known_sides
        ):
            continue
        largest = max(side.step for side in known_sides)
        if not 0 < largest < np.inf or _FINEST_COMPARED <= largest < 1:
            continue
        # A power of two scales values without rounding them.
        factor = 2.0 ** -(math.floor(math.log2(largest)) + 1)
        with tf.name_scope(f"{op.name}/scaled"):
            scaled = [side.times(factor) for side in known_sides]
        for index, tensor in enumerate(scaled):
            creation.set_new_input(op, index, tensor)


def with_bias_vectors(graph: Graph, results: Sequence[Tensor]) -> list[Tensor]:
    """Let biases be vectors: of several axes, and one number for all channels."""
    sum_by_result: MutableIdentityMap[Tensor] = MutableIdentityMap()
    origins = Origins(graph)
    for op in graph.get_operations():
        if op.type not in op_types.ADDITIONS or len(op.inputs) != 2:
            continue
        for bias, data in (op.inputs, reversed(op.inputs)):
            vector = _bias_vector(bias, data, origins)
            if vector is not None:
                readers = op.outputs[0].consumers()
                # The file tells the op by its name, but for digits.
                new_sum = tf.add(data, vector, name=f"{op.name}0")
                sum_by_result[op.outputs[0]] = new_sum
                read_instead(readers, op.outputs[0], new_sum)
                break
    return [sum_by_result.get(t, t) for t in results]


def with_factors_apart(graph: Graph) -> None:
    """Keep products with one number out of the weights of convolutions behind them.

    The number becomes a vector; where there is one channel, or no telling how many, a
    maximum that changes nothing stands between.
    """
    for op in graph.get_operations():
        if op.type not in _SCALINGS or op.outputs[0].shape.rank not in _OF_IMAGES:
            continue
        # Behind a range no convolution takes it in.
        if all(reader.type in FAKE_QUANT for reader in op.outputs[0].consumers()):
            continue
        first, second = op.inputs
        if _is_one(second):
            _keep_apart(op, first, second)
        elif _is_one(first) and op.type in _PRODUCTS:
            _keep_apart(op, second, first)


_PRODUCTS = ("Mul",)
_SCALINGS = (*_PRODUCTS, "RealDiv")
_OF_IMAGES = (None, 4, 5)


def _is_one(tensor: Tensor) -> bool:
    return tensor.dtype == tf.float32 and tensor.shape.num_elements() == 1


def _keep_apart(op: Operation, data: Tensor, factor: Tensor) -> None:
    readers = op.outputs[0].consumers()
    channels = data.shape[-1] if data.shape.rank else None
    if channels is None or channels < 2:
        lowest = tf.constant(np.finfo(np.float32).min)
        apart = tf.maximum(op.outputs[0], lowest, name=f"{op.name}0")
    else:
        vector = tf.broadcast_to(tf.reshape(factor, [1]), [channels])
        scaled = tf.multiply if op.type in _PRODUCTS else tf.realdiv
        # The file tells the op by its name, but for digits.
        apart = scaled(data, vector, name=f"{op.name}0")
    read_instead(readers, op.outputs[0], apart)


def _bias_vector(bias: Tensor, data: Tensor, origins: Origins) -> Array | None:
    """Return the vector that stands for a layer's bias; None if it is one, or none."""
    layer = layer_of(network.forwarded_from(data).op, origins)
    value = None if layer is None else tf.get_static_value(bias)
    if layer is None or layer.axis != -1 or value is None:
        return None
    # A bias adds no axes.
    if not data.shape.rank or value.ndim > data.shape.rank:
        return None
    channels = data.shape.as_list()[-1]
    if value.ndim > 1 and value.size == value.shape[-1] == channels:
        return value.reshape(-1)
    if value.size != 1 or channels is None or channels < 2 or not value.any():
        return None
    vector = np.full([channels], value.flat[0])
    # The converter takes no number for all channels: one is larger by a rounding error.
    vector[-1] = np.nextafter(vector[-1], np.inf, dtype=vector.dtype)
    return vector


def _fixed_range(op: Operation) -> tuple[float, float] | None:
    """Return the range of a FakeQuant op, one for all channels; None if not known."""
    if op.type not in FAKE_QUANT:
        return None
    low, high = simulated_ends(op, {})
    if low is None or high is None or np.ndim(low):
        return None
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class _Side:
    """An operand of a comparison in int8: quantized data, or numbers."""

    tensor: Tensor
    simulation: Operation | None
    ends: tuple[float, float]

    @classmethod
    def of(cls, tensor: Tensor) -> _Side | None:
        """Return a side of a comparison; None if it is not known how it is stored."""
        value = tf.get_static_value(tensor)
        if value is not None:
            array = np.asarray(value)
            if (
                array.dtype != np.float32
                or not array.size
                or not np.isfinite(array).all()
            ):
                return None
            low, high = with_zero(array.min(), array.max())
            return cls(tensor, None, (float(low), float(high)))
        op = network.forwarded_from(tensor).op
        ends = _fixed_range(op)
        return None if ends is None else cls(tensor, op, ends)

    @property
    def step(self) -> float:
        """The size of a step that it is stored in."""
        return float(step(*self.ends, *self._bits))

    @property
    def _bits(self) -> tuple[int, bool]:
        if self.simulation is None:
            return 8, False
        form = format_of_simulation(self.simulation)
        return form.bits, form.narrow_range

    def times(self, factor: float) -> Tensor:
        """Return it times a factor, stored in the same integers."""
        if self.ends == (0.0, 0.0):
            return self.tensor
        simulate = tf.quantization.fake_quant_with_min_max_vars
        if self.simulation is None:
            product = tf.constant(tf.get_static_value(self.tensor) * np.float32(factor))
        else:
            one = simulate(tf.constant(factor, tf.float32), 0.0, factor)
            product = self.tensor * one
        low, high = (end * factor for end in self.ends)
        return simulate(product, low, high, *self._bits)


Values = dict[Operation, Array]


def nudge(op: Operation, low: Any, high: Any) -> Range:
    """Return a range as a FakeQuant op nudges it."""
    return nudged(low, high, op.get_attr("num_bits"), op.get_attr("narrow_range"))


def nudged_ranges(graph: Graph, constants: Mapping[Operation, Array]) -> Values:
    """Return nudged ends of ranges, by the ops that read them."""
    value_by_end: Values = {}
    for op in graph.get_operations():
        ends = [t.op for t in op.inputs][1:] if op.type in FAKE_QUANT else []
        # Symmetric ranges have their zero point at an integer.
        if len(ends) != 2 or op.get_attr("narrow_range"):
            continue
        if all(end in constants for end in ends):
            nudged_ends = nudge(op, *(constants[end] for end in ends))
            value_by_end.update(zip(ends, map(np.asarray, nudged_ends), strict=True))
    return value_by_end


# The relative step of float32.
_ROUNDING = 2.0**-23
_BITS = 8  # those of int8
_MOST = 2.0 ** (_BITS - 1) - 1


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
        reads = [
            (reader, slot)
            for reader in dict.fromkeys(op.outputs[0].consumers())
            for slot, tensor in enumerate(reader.inputs)
            if tensor is op.outputs[0]
        ]
        for reader, slot in reads:
            count = uses.get(weights.key, 0)
            uses[weights.key] = count + 1
            # The converter merges equal weights; a rounding of float32 parts them.
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
        """Return the result of a FakeQuant op for values of its inputs."""
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


_TRANSPOSED, _WEIGHTS = "Conv2DBackpropInput", 1


class Apart:
    """The marked ops of a copy of a graph, on their way through the converter."""

    def __init__(self) -> None:
        """Begin with no copy."""
        # By the names of the inputs that take their place.
        self._weights: dict[str, Array] = {}
        self._has_edges = False

    def set_apart(
        self, graph: Graph, results: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Make values complex and real again around marked ops."""
        ops = [op for op in graph.get_operations() if network.is_left_in_float(op)]
        if not ops:
            return list(results), {}
        self._has_edges = True
        marked, origins = frozenset(ops), Origins(graph)
        again: MutableIdentityMap[Tensor] = MutableIdentityMap()

        def real(tensor: Tensor) -> Tensor:
            if tensor not in again:
                again[tensor] = tf.math.real(tf.cast(tensor, tf.complex64))
            return again[tensor]

        def is_data(tensor: Tensor) -> bool:
            return tensor.dtype == tf.float32 and not origins.is_parameter(tensor)

        for op in ops:
            for slot, tensor in enumerate(op.inputs):
                if tensor.op not in marked and is_data(tensor):
                    creation.set_new_input(op, slot, real(tensor))
        for tensor in (t for op in ops for t in op.outputs if is_data(t)):
            readers = [op for op in tensor.consumers() if op not in marked]
            if readers:
                read_instead(readers, tensor, real(tensor))
        ends = [real(t) if t.op in marked and is_data(t) else t for t in results]
        return ends, self._given(ops)

    def _given(self, ops: Sequence[Operation]) -> dict[str, Tensor]:
        """Let transposed convolutions read weights from inputs; return these."""
        layers = [op for op in ops if op.type == _TRANSPOSED]
        with tf.init_scope():
            values = values_of([op.inputs[_WEIGHTS] for op in layers])
        given = {}
        for index, (op, value) in enumerate(zip(layers, values, strict=True)):
            name = f"float_weights_{index}"
            self._weights[name] = value
            given[name] = tf.compat.v1.placeholder(value.dtype, value.shape, name)
            creation.set_new_input(op, _WEIGHTS, given[name])
        return given

    def joined(self, blob: bytes) -> bytes:
        """Return the file without these edges, and with weights in it."""
        if not self._has_edges:
            return blob
        file = tflite.open(blob)
        self.join(file)
        file.strip()
        return file.to_bytes()

    def join(self, file: LiteFile) -> set[str]:
        """Leave edges out of a file, put weights in; return their placeholders."""
        if not self._has_edges:
            return set()
        for signature in file.signatures.values():
            for name in self._weights.keys() & signature.inputs.keys():
                tensor = signature.inputs.pop(name)
                _store(signature.graph, tensor, self._weights[name])
        return {name for graph in file.graphs for name in _joined(file, graph)}


def _store(graph: LiteGraph, weights: LiteTensor, value: Array) -> None:
    """Replace weights that are an input by a constant, and their transposition, too."""
    graph.inputs = tuple(t for t in graph.inputs if t is not weights)
    weights.store(value, "float32")
    moving = [op for op in weights.consumers if op.kind == "TRANSPOSE"]
    for op in moving:
        op.outputs[0].store(value.transpose(op.reads[1].value), "float32")
    graph.set_ops(op for op in graph.ops if op not in moving)


def _joined(file: LiteFile, graph: LiteGraph) -> list[str]:
    """Let ops read values that were made complex and real again; return their names."""
    source_of: dict[LiteTensor, LiteTensor] = {}
    kept = []
    for op in graph.ops:
        op.inputs = tuple(source_of.get(t, t) if t else None for t in op.inputs)
        cast = op.reads[0].producer if op.kind == "REAL" else None
        if cast is not None and cast.kind == "CAST":
            source_of[op.outputs[0]] = cast.reads[0]
        else:
            kept.append(op)
    graph.set_ops(kept)
    for made, source in source_of.items():
        set_end(file, graph, made, source)
    return [made.name for made in source_of]
