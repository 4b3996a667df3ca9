"""Ops that become part of one kernel.

Biases, activations, activations written as several ops, moves around dilated
convolutions.

They are recognized by their values: a group of elementwise ops with one tensor going in
and one coming out is run on numbers, and compared with the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.graph.edits import Liveness
from geutil.graph.op_types import ADDITIONS, CONVOLUTIONS_2D, SCALINGS, types_in
from geutil.graph.types import IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.int8_kernels import FUSED_ACTIVATIONS, Treatment
from geutil.quantize.planning.network import Network, kernel_of, neutral_input
from geutil.select.networks.layers import Layer, data_format, scalar_value


@dataclass(frozen=True, eq=False)
class Prelu:
    """A sum `relu(x) + -alpha * relu(-x)`."""

    end: Operation
    product: Operation
    slot: int  # which input of the product is `relu(-x)`
    source: Tensor  # the tensor `x`
    alpha: Tensor
    ops: tuple[Operation, ...]


def find_prelus(network: Network) -> list[Prelu]:
    """Return the PReLUs of a network that nothing else reads the inside of."""
    sums = (op for op in network.ops if op.type in ADDITIONS)
    return [prelu for op in sums if (prelu := _prelu(op, network)) is not None]


def _prelu(end: Operation, network: Network) -> Prelu | None:
    """Return the PReLU that ends in a sum, its operands in any order, or None."""
    # Keras computes a PReLU as relu(x) + -alpha * relu(-x).
    for positive, product in (end.inputs, reversed(end.inputs)):
        if positive.op.type != "Relu" or product.op.type != "Mul":
            continue
        source = positive.op.inputs[0]
        for slot in (0, 1):
            negative, factor = product.op.inputs[slot].op, product.op.inputs[1 - slot]
            if negative.type != "Relu" or negative.inputs[0].op.type != "Neg":
                continue
            turned = negative.inputs[0].op
            if turned.inputs[0] is not source or factor.op.type != "Neg":
                continue
            alpha = factor.op.inputs[0]
            inner = (positive.op, product.op, negative, turned)
            if not network.is_parameter(alpha) or not _read_within(inner, network):
                continue
            return Prelu(end, product.op, slot, source, alpha, (end, *inner))
    return None


def _read_within(ops: Iterable[Operation], network: Network) -> bool:
    tensors = [op.outputs[0] for op in ops]
    return all(
        len(network.readers(t)) == 1 and t not in network.results for t in tensors
    )


Array = np.ndarray[Any, Any]

_erf = np.vectorize(math.erf)
# Behind 8 and -8 all of these activations are within 1e-4 of x or 0, or level off.
_GRID = np.linspace(-8.0, 8.0, 401)
_MOST_OPS = 16  # twice the 8 ops of a gelu by tanh, constants apart
_NEAR = 1e-4
"""The tanh form of gelu is told from the erf form; float32 constants are not exact."""

_UNARY: dict[str, Callable[[Array], Array]] = {
    "Erf": _erf,
    "Erfc": lambda x: 1.0 - _erf(x),
    "Identity": lambda x: x,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0.0),
    "Relu6": lambda x: np.clip(x, 0.0, 6.0),
    "Square": np.square,
    "Tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Sub": np.subtract,
}


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], ...]] = {
    "hard_swish": (lambda x: x * np.clip(x + 3, 0, 6) / 6,),
    "gelu": (lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), _gelu_tanh),
}
_VALUES = {
    name: [function(_GRID) for function in functions]
    for name, functions in _FUNCTIONS.items()
}
# Without one of these no group is looked at.
_HINTS = types_in(
    """
    Relu6 Relu Erf Erfc Tanh Minimum Maximum
    """
)


@dataclass(frozen=True, eq=False)
class Composite:
    """An activation that is written out."""

    name: str
    source: Tensor  # the tensor that goes in
    ops: tuple[Operation, ...]  # its ops, the last one first

    @property
    def end(self) -> Operation:
        """The op whose result is the activation's."""
        return self.ops[0]


def find_composites(
    ops: Iterable[Operation], readers: Callable[[Tensor], list[Operation]]
) -> list[Composite]:
    """Return the activations that are written out, in the order of their last ops."""
    place = {op: index for index, op in enumerate(ops)}
    ends = (op for op in place if op.type in SCALINGS and op.inputs)
    return [c for op in ends if (c := _ending_in(op, place, readers)) is not None]


def _ending_in(
    end: Operation,
    place: Mapping[Operation, int],
    readers: Callable[[Tensor], list[Operation]],
) -> Composite | None:
    """Grow a group backwards from its end until one tensor alone goes in."""
    group: list[Operation] = []
    frontier: IdentitySet = IdentitySet(end.outputs)
    while len(group) < _MOST_OPS:
        # The latest op goes first: those that read the others are in the group by then.
        (*_, latest) = sorted(frontier, key=lambda t: place.get(t.op, -1))
        op = latest.op
        if op not in place or op.type not in _UNARY.keys() | _BINARY.keys():
            return None
        group.append(op)
        entering = [t for t in op.inputs if scalar_value(t) is None]
        rest = (t for t in frontier if t is not latest)
        frontier = IdentitySet((*rest, *entering))
        if not frontier:
            return None
        if len(frontier) == 1 and any(op.type in _HINTS for op in group):
            (source,) = frontier
            name = _name(group, source)
            if name and _closed(group, readers):
                return Composite(name, source, tuple(group))
    return None


def _closed(
    group: list[Operation], readers: Callable[[Tensor], list[Operation]]
) -> bool:
    """Tell whether only the last op is read from outside."""
    members = frozenset(group)
    inner = group[1:]
    return all(r in members for op in inner for r in readers(op.outputs[0]))


def _name(group: list[Operation], source: Tensor) -> str:
    """Return the activation that a group computes, or ""."""
    values: MutableIdentityMap[Array] = MutableIdentityMap([(source, _GRID)])
    with np.errstate(all="ignore"):
        for op in reversed(group):
            operands = [_operand(t, values) for t in op.inputs]
            function: Any = _UNARY.get(op.type) or _BINARY[op.type]
            values[op.outputs[0]] = function(*operands)
    result = values[group[0].outputs[0]]
    for name, expected_values in _VALUES.items():
        if any(np.allclose(result, w, rtol=0, atol=_NEAR) for w in expected_values):
            return name
    return ""


def _operand(tensor: Tensor, values: Mapping[Any, Array]) -> Array:
    return (
        values[tensor] if tensor in values else np.asarray(scalar_value(tensor), float)
    )


_SUMS = frozenset(("Add", "AddV2", "BiasAdd", "BiasAddV1"))
_RESHAPING = types_in(
    """
    BatchToSpaceND EnsureShape ExpandDims Identity PlaceholderWithDefault
    PreventGradient Reshape Snapshot Squeeze StopGradient
    """
)
"""Types of ops that the converter moves a bias over, or an activation."""
_MOVING = frozenset(("DepthToSpace", "MaxPool", "Transpose"))
"""Those that it moves an activation over, and no bias (TensorFlow 2.21). Behind others,
such as slices and pads, it leaves either alone and runs the layer in float."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Ops that one kernel computes."""

    ops: tuple[Operation, ...]  # the ops, in order; the first one does the work
    result: Tensor  # what the last one makes
    activation: str  # the activation at the end; "" if there is none

    @property
    def inside(self) -> tuple[Tensor, ...]:
        """The tensors on the way that have the shape of the result."""
        tensors: list[Tensor] = []
        for op in reversed(self.ops[:-1]):
            (tensor,) = op.outputs
            if tensor.shape.rank is None or self.result.shape.rank is None:
                break
            if tensor.shape.as_list() != self.result.shape.as_list():
                break
            tensors.append(tensor)
            if _passes(op):
                break
        return tuple(tensors)


def chain_from(
    op: Operation, network: Network, may_take: Callable[[Operation], bool]
) -> Chain:
    """Return the ops that the kernel of an op computes."""
    chain_ops = [op]
    passed: list[Operation] = []
    tensor, cursor = op.outputs[0], op.outputs[0]
    layer = network.layers.get(op)
    # Its result is a matrix, to which the converter gives its axes afterwards.
    takes_bias = may_add = layer is not None and not layer.spreads
    # Without a bias the converter runs the two one by one, the layer in float.
    takes_activation = layer is None or not layer.transposed
    while cursor not in network.results and network.quantized(cursor) is None:
        edges = network.readers(cursor)
        if len(edges) != 1 or not may_take(edges[0].op):
            break
        reader, index = edges[0]
        if reader.type in FUSED_ACTIVATIONS:
            if not takes_activation:
                break
            chain_ops += [*passed, reader]
            return Chain(
                tuple(chain_ops), reader.outputs[0], FUSED_ACTIVATIONS[reader.type]
            )
        if layer and neutral_input(reader) == index:
            # No bias, although it is written as one: the next may be one.
            passed.append(reader)
            cursor = reader.outputs[0]
            continue
        if layer and may_add and _is_bias(reader, index, layer, network):
            if not all(_leaves_channels(p, reader, index) for p in passed):
                break
            chain_ops += [*passed, reader]
            passed = []
            takes_bias, takes_activation = False, True
            # The converter adds constants behind a bias to it: the 3 of a hard sigmoid.
            may_add = not network.is_statistic(reader.inputs[1 - index])
        elif takes_bias and _is_correction(reader, index, network):
            chain_ops += [*passed, reader]
            passed = []
        elif op in network.layers and _may_stand_between(reader, op, network):
            passed.append(reader)
            cursor = reader.outputs[0]
            continue
        else:
            break
        tensor = cursor = reader.outputs[0]
    return Chain(tuple(chain_ops), tensor, "")


def _passes(op: Operation) -> bool:
    kernel = kernel_of(op)
    return kernel is not None and kernel.treatment is Treatment.PASSES


def _may_stand_between(op: Operation, layer: Operation, network: Network) -> bool:
    """Tell whether an op may stand between a layer and its bias or activation."""
    # A BatchToSpace does in a dilated convolution only.
    if op.type != "BatchToSpaceND":
        return op.type in _RESHAPING | _MOVING
    before = layer.inputs[0].op
    spread = before.inputs[0].op if before.type == "ExpandDims" else before
    return any(
        moved_convolution.gathered is op
        for moved_convolution in find_moved([spread], network.live)
    )


def _leaves_channels(op: Operation, bias: Operation, index: int) -> bool:
    """Tell whether the converter moves a bias over an op that stands before it."""
    # Over a Reshape to a shape that is known, if it adds to the last axis, which stays.
    if op.type != "Reshape":
        return op.type in _RESHAPING or neutral_input(op) is not None
    if tf.get_static_value(op.inputs[1]) is None:
        return False
    before, after = op.inputs[0].shape, op.outputs[0].shape
    value = bias.inputs[1 - index].shape
    if None in (before.rank, after.rank) or value.rank != 1:
        return False
    return bool(before[-1] == after[-1] == value[-1])


class PartedBias(NamedTuple):
    """A bias that is added behind a Reshape which parts the channels of a layer."""

    data: Tensor  # the result of the layer
    bias: Tensor  # the parameter, with one value for each channel
    shape: Tensor  # the shape that the Reshape gives the result


def parted_bias(op: Operation) -> PartedBias | None:
    """Return the bias that a sum adds to the parts of a layer's channels, or None."""
    # The heads of an attention, for example: [batch, n, channels] becomes [batch, n,
    # heads, size], and [heads, size] is added. It looks at shapes and at who reads what
    # lies between; not at what the first tensor comes from, nor at the second.
    if op.type not in ADDITIONS:
        return None
    for data, bias in (op.inputs, reversed(op.inputs)):
        reshape = data.op
        if reshape.type != "Reshape" or bias.shape.rank is None:
            continue
        sizes = bias.shape.as_list()
        while sizes[:1] == [1]:
            sizes.pop(0)
        before, after = reshape.inputs[0].shape, data.shape
        if None in (before.rank, after.rank, *sizes) or len(sizes) < 2:
            continue
        # Whole channels in order: all axes before them are those of the examples.
        if after.as_list()[-len(sizes) :] == sizes and before[-1] == math.prod(sizes):
            return PartedBias(reshape.inputs[0], bias, reshape.inputs[1])
    return None


def _is_bias(op: Operation, index: int, layer: Layer, network: Network) -> bool:
    if op.type not in _SUMS:
        return False
    data, other = op.inputs[index], op.inputs[1 - index]
    if network.is_statistic(other):
        return True
    return network.is_parameter(other) and (
        op.type not in ADDITIONS or _is_by_channel(other, data, layer)
    )


def _is_by_channel(bias: Tensor, data: Tensor, layer: Layer) -> bool:
    """Tell whether a bias has one value for each channel of a layer, or for all."""
    # A table of positions, say, has more, and is added by a kernel of its own.
    if None in (bias.shape.rank, data.shape.rank):
        return True
    sizes = bias.shape.as_list()
    if len(sizes) > data.shape.rank:
        return False
    channels = sizes.pop(layer.axis) if len(sizes) >= -layer.axis else 1
    return set(sizes) <= {1} and channels in (1, data.shape[layer.axis])


def _is_correction(op: Operation, index: int, network: Network) -> bool:
    """Tell whether a product is the correction of a norm folded for training."""
    return op.type == "Mul" and network.is_statistic(op.inputs[1 - index])


@dataclass(frozen=True, eq=False)
class Moved:
    """A convolution between two moves, which only such read the inside of."""

    # SpaceToBatch forwards every n-th row and column as an image of its own, an
    # ordinary convolution follows, with or without a bias, and BatchToSpace puts the
    # rows and columns back.

    spread: Operation  # the SpaceToBatchND before it
    convolution: Operation
    gathered: Operation  # the BatchToSpaceND behind it
    # The axis of size 1 that a convolution along one axis is given in between; None for
    # two.
    axis: int | None

    @property
    def numbers(self) -> list[Tensor]:
        """Blocks and paddings of the first move, then blocks and crops of the last."""
        return [*list(self.spread.inputs)[1:], *list(self.gathered.inputs)[1:]]


def find_moved(ops: Iterable[Operation], live: Liveness) -> Iterator[Moved]:
    """Yield the convolutions between moves that can be written as dilated ones."""
    for op in ops:
        if op.type == "SpaceToBatchND" and not live.is_retired(op):
            # Folded for training, a layer runs twice on what is spread once.
            candidates = [
                _moved_behind(op, reader, live) for reader in live.readers(op)
            ]
            moved_convolutions = [
                m for m in candidates if m is not None and not _crops_data(m)
            ]
            if len(moved_convolutions) == len(candidates):
                yield from moved_convolutions


def _moved_behind(spread: Operation, reader: Operation, live: Liveness) -> Moved | None:
    """Return a dilated convolution, from SpaceToBatchND on; None if it is none."""
    middle, axis = reader, None
    # A convolution of one dimension runs as one of two, with an axis of size 1.
    if middle.type == "ExpandDims":
        axis = _positive(tf.get_static_value(middle.inputs[1]))
        middle = _only_reader(middle, live) if axis in (1, 2) else None
    if middle is None or not _is_plain(middle):
        return None
    end = _only_reader(middle, live)
    if end is not None and end.type == "BiasAdd":
        end = _only_reader(end, live)
    if end is not None and axis is not None:
        removed = end.get_attr("squeeze_dims") if end.type == "Squeeze" else []
        removes = [_positive(index) for index in removed] == [axis]
        end = _only_reader(end, live) if removes else None
    if end is None or end.type != "BatchToSpaceND":
        return None
    return Moved(spread, middle, end, axis)


def _positive(axis: int | None) -> int | None:
    """Return an axis of images counted from the first one."""
    return None if axis is None else int(axis) % 4


def _only_reader(op: Operation, live: Liveness) -> Operation | None:
    readers = tuple(live.readers(op))
    return readers[0] if len(readers) == 1 and len(op.outputs) == 1 else None


def _is_plain(op: Operation) -> bool:
    """Tell whether an op is a convolution that looks at each place, without zeros."""
    if op.type not in CONVOLUTIONS_2D or data_format(op) != "NHWC":
        return False
    ones = {*op.get_attr("strides"), *op.get_attr("dilations")} == {1}
    window = op.inputs[1].shape
    has_known_size = window.rank == 4 and None not in window.as_list()[:2]
    return ones and has_known_size and bool(op.get_attr("padding") == b"VALID")


def _crops_data(moved_convolution: Moved) -> bool:
    """Tell whether more is cropped than zeros were added, as far as that is known."""
    before, padding, after, crops = (
        tf.get_static_value(t) for t in moved_convolution.numbers
    )
    if any(value is None for value in (before, padding, after, crops)):
        return False
    return not np.array_equal(before, after) or bool(np.any(padding < crops))
