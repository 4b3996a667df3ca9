"""Ops as TFLite's kernels compute them: several in one kernel, or in other forms.

Biases and activations become part of the kernel before them, and an activation that is
written as several ops is one kernel. Ops without a kernel are rewritten as ops that
have one.

Activations are recognized by their values: a group of elementwise ops with one tensor
going in and one coming out is run on numbers, and compared with the activation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.graph import op_types, replicas, types
from geutil.graph.creation import Function, Stencils
from geutil.graph.edits import (
    InputEdit,
    Liveness,
    apply_edits,
    reader_edits,
    results_of,
    set_results,
)
from geutil.graph.runtime import inlined_convolution
from geutil.graph.types import Graph, IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.network import (
    Network,
    find_moved,
    kernel_of,
    neutral_input,
)
from geutil.rewrite.driver import replace_each
from geutil.select.networks.batch_norms import is_layer_norm
from geutil.select.networks.layers import Layer, scalar_value


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
    sums = (op for op in network.ops if op.type in op_types.ADDITIONS)
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
"""The two forms of gelu are farther apart; float32 constants are not exact."""

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
_HINTS = op_types.types_in(
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
    ends = (op for op in place if op.type in op_types.SCALINGS and op.inputs)
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
    """Return whether only the last op is read from outside."""
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
_RESHAPING = op_types.types_in(
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
        if reader.type in int8_kernels.FUSED_ACTIVATIONS:
            if not takes_activation:
                break
            chain_ops += [*passed, reader]
            return Chain(
                tuple(chain_ops),
                reader.outputs[0],
                int8_kernels.FUSED_ACTIVATIONS[reader.type],
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
    return kernel is not None and kernel.treatment is int8_kernels.Treatment.PASSES


def _may_stand_between(op: Operation, layer: Operation, network: Network) -> bool:
    """Return whether an op may stand between a layer and its bias or activation."""
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
    """Return whether the converter moves a bias over an op that stands before it."""
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
    if op.type not in op_types.ADDITIONS:
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
        op.type not in op_types.ADDITIONS or _is_by_channel(other, data, layer)
    )


def _is_by_channel(bias: Tensor, data: Tensor, layer: Layer) -> bool:
    """Return whether a bias has one value for each channel of a layer, or for all."""
    # A table of positions, say, has more, and is added by a kernel of its own.
    if None in (bias.shape.rank, data.shape.rank):
        return True
    sizes = bias.shape.as_list()
    if len(sizes) > data.shape.rank:
        return False
    channels = sizes.pop(layer.axis) if len(sizes) >= -layer.axis else 1
    return set(sizes) <= {1} and channels in (1, data.shape[layer.axis])


def _is_correction(op: Operation, index: int, network: Network) -> bool:
    """Return whether a product is the correction of a norm folded for training."""
    return op.type == "Mul" and network.is_statistic(op.inputs[1 - index])


class Form(NamedTuple):
    """Ops that compute the same as another op."""

    words: str
    scope: str  # the last part of the new ops' scope
    key: Hashable  # tells apart what makes other ops
    function: Function
    inputs: Sequence[Tensor]


def int8_form(op: Operation) -> Form | None:
    """Return the form of an op whose parts have int8 kernels; None if there is none."""
    form = _INT8.get(op.type) or _UNCONVERTED.get(op.type)
    return None if form is None else form(op)


def converted_form(op: Operation) -> Form | None:
    """Return the form of an op that TFLite's converter refuses as it is, or None."""
    form = _UNCONVERTED.get(op.type)
    return None if form is None else form(op)


def _plain(words: str, scope: str, function: Function) -> Callable[[Operation], Form]:
    """Return the maker of a form that depends on nothing but the inputs of an op."""
    return lambda op: Form(words, scope, words, function, op.inputs)


def _negative(x: tf.Tensor) -> list[tf.Tensor]:
    factor = tf.constant(-1.0, tf.float32, name="factor")
    return [tf.multiply(x, factor, name="product")]


def _layer_norm(op: Operation) -> Form | None:
    """The converter would take it apart, too, but where no FakeQuant can lie inside."""
    if not is_layer_norm(op) or op.inputs[0].dtype != tf.float32:
        return None
    epsilon = float(op.get_attr("epsilon"))

    def normalized(x: tf.Tensor) -> list[tf.Tensor]:
        # The batch of one is none to take a mean over.
        axes = list(range(2, x.shape.rank))
        mean = tf.reduce_mean(x, axes, keepdims=True, name="mean")
        squares = tf.math.squared_difference(x, mean, name="squares")
        variance = tf.reduce_mean(squares, axes, keepdims=True, name="variance")
        factor = tf.math.rsqrt(variance + epsilon, name="factor")
        return [tf.multiply(x - mean, factor, name="normalized")]

    words = "is a layer norm and computes (x - mean) * rsqrt(variance + epsilon)"
    return Form(words, "norm", ("norm", op), normalized, op.inputs[:1])


def _one_hot(op: Operation) -> Form | None:
    """One-hot vectors that are quantized make the converter fail."""
    # It moves that to the two values, which the kernel does not take in int8.
    one_hot = op.inputs[0].op if op.type == "Cast" else op
    if one_hot.type != "OneHot":
        return None
    indices, *_, off = one_hot.inputs
    axis = int(one_hot.get_attr("axis"))

    def chosen(
        indices: tf.Tensor, depth: tf.Tensor, on: tf.Tensor, off: tf.Tensor
    ) -> list[tf.Tensor]:
        mask = tf.one_hot(indices, depth, True, False, axis, tf.bool, name="mask")
        on, off = (tf.cast(value, tf.float32) for value in (on, off))
        return [tf.where(mask, on, off, name="choice")]

    key = ("one-hot", axis, indices.dtype.name, off.dtype.name)
    return Form("chooses by a mask", "choice", key, chosen, one_hot.inputs)


def _division(op: Operation) -> Form | None:
    """The int8 kernel for divisions takes no divisor that is stored as 0."""
    *dividend, root = op.inputs
    if root.op.type == "Sqrt":

        def by_root(*xs: tf.Tensor) -> list[tf.Tensor]:
            inverse = tf.math.rsqrt(xs[-1], name="rsqrt")
            return [tf.multiply(xs[0], inverse, name="product") if xs[1:] else inverse]

        inputs = [*dividend, root.op.inputs[0]]
        key = ("root", len(dividend))
        return Form("computes by rsqrt", "by_root", key, by_root, inputs)
    if op.type in int8_kernels.DIVISIONS:
        return None
    divisor = tf.get_static_value(root)
    # DivNoNan and Xdivy are plain divisions by constants without zeros alone.
    if op.type != "Div" and (divisor is None or not np.all(divisor)):
        return None
    form = _plain(
        "computes x / y", "quotient", lambda x, y: [tf.divide(x, y, name="quotient")]
    )
    return form(op)


def _squared(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    difference = tf.subtract(x, y, name="difference")
    return [tf.multiply(difference, difference, name="square")]


def _squared_twice(x: tf.Tensor) -> tf.Tensor:
    square = tf.multiply(x, x, name="square")
    return tf.multiply(square, square, name="power")


_POWERS: dict[float, tuple[str, Callable[[tf.Tensor], tf.Tensor]]] = {
    -0.5: ("rsqrt(x)", lambda x: tf.math.rsqrt(x, name="power")),
    0.5: ("sqrt(x)", lambda x: tf.sqrt(x, name="power")),
    1.0: ("x", lambda x: tf.identity(x, name="power")),
    2.0: ("x * x", lambda x: tf.multiply(x, x, name="power")),
    3.0: ("x * x * x", lambda x: tf.multiply(x * x, x, name="power")),
    4.0: ("(x * x) * (x * x)", _squared_twice),
}
"""Exponents of powers that other ops compute, and these."""


def _power(op: Operation) -> Form | None:
    exponent = 2.0
    if op.type == "Pow":
        value = tf.get_static_value(op.inputs[1])
        # Of more axes than x, it would give the result more.
        if (
            value is None
            or value.size != 1
            or value.ndim > (op.inputs[0].shape.rank or 0)
        ):
            return None
        exponent = float(value.reshape(()))
    if exponent not in _POWERS:
        return None
    words, compute = _POWERS[exponent]
    key = ("power", exponent)
    return Form(
        f"computes {words}", "power", key, lambda x: [compute(x)], op.inputs[:1]
    )


def _sum(op: Operation) -> Form | None:
    inputs = list(op.inputs)
    if len(inputs) == 1:
        return None
    words = f"adds {len(inputs)} tensors one by one"

    def added(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return [functools.reduce(tf.add, tensors)]

    return Form(words, "sum", ("sum", len(inputs)), added, inputs)


def _scaled_elu(x: tf.Tensor) -> list[tf.Tensor]:
    # Klambauer et al., Self-Normalizing Neural Networks, 2017, section 2.
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    falling = (tf.exp(tf.minimum(x, 0.0)) - 1.0) * (scale * alpha)
    return [tf.add(tf.nn.relu(x) * scale, falling, name="selu")]


def _clipped(x: tf.Tensor, low: tf.Tensor, high: tf.Tensor) -> list[tf.Tensor]:
    return [tf.maximum(tf.minimum(x, high, name="minimum"), low, name="maximum")]


def _norm(op: Operation) -> Form:
    keeps = bool(op.get_attr("keep_dims"))

    def norm(x: tf.Tensor, axes: tf.Tensor) -> list[tf.Tensor]:
        return [tf.sqrt(tf.reduce_sum(x * x, axes, keeps), name="norm")]

    words = "computes sqrt(sum(x * x))"
    return Form(words, "norm", ("euclidean norm", keeps), norm, op.inputs)


def _roll(op: Operation) -> Form | None:
    """The converter takes it apart, too, if no size is unknown, the batch's neither."""
    x, shifts, axes = op.inputs
    places = tf.get_static_value(axes)
    if x.shape.is_fully_defined() or places is None or x.shape.rank is None:
        return None
    amounts = tf.get_static_value(shifts)
    sizes = x.shape.as_list()
    turned = [int(axis) % len(sizes) for axis in places.reshape(-1)]

    def rolled(x: tf.Tensor, *shifts: tf.Tensor) -> list[tf.Tensor]:
        for index, axis in enumerate(turned):
            size = sizes[axis]
            if amounts is None:
                shift = tf.cast(tf.reshape(shifts[0], [-1])[index], tf.int32)
            else:
                shift = int(amounts.reshape(-1)[index])
            if size is None:
                size = tf.shape(x)[axis]
            # How many of the first go behind the others.
            start = -shift % size
            if isinstance(start, int) and start == 0:
                continue
            before = (slice(None),) * axis
            x = tf.concat(
                [x[(*before, slice(start, None))], x[(*before, slice(start))]], axis
            )
        return [tf.identity(x, name="rolled")]

    inputs = [x, shifts] if amounts is None else [x]
    constant = None if amounts is None else tuple(amounts.reshape(-1).tolist())
    key = ("roll", tuple(turned), constant, tuple(sizes))
    return Form("joins two slices for each axis", "roll", key, rolled, inputs)


_INT8: dict[str, Callable[[Operation], Form | None]] = {
    **dict.fromkeys(op_types.FUSED_NORMS, _layer_norm),
    **dict.fromkeys((*int8_kernels.DIVISIONS, "Div", "DivNoNan", "Xdivy"), _division),
    **dict.fromkeys(("Pow", "Square"), _power),
    **dict.fromkeys(("Cast", "OneHot"), _one_hot),
    "AddN": _sum,
    "BiasAddV1": _plain(
        "computes x + b", "sum", lambda x, bias: [tf.nn.bias_add(x, bias, name="sum")]
    ),
    "Expm1": _plain(
        "computes exp(x) - 1",
        "exp",
        lambda x: [tf.subtract(tf.exp(x), 1.0, name="less_one")],
    ),
    "Log1p": _plain(
        "computes log(x + 1)", "log", lambda x: [tf.math.log(x + 1.0, name="log")]
    ),
    "MulNoNan": _plain(
        "computes x * y", "product", lambda x, y: [tf.multiply(x, y, name="product")]
    ),
    "Neg": _plain("computes x * -1", "product", _negative),
    "Selu": _plain(
        "computes scale * (relu(x) + alpha * (exp(min(x, 0)) - 1))", "selu", _scaled_elu
    ),
    # Of more than four axes the converter takes it apart, with no FakeQuant inside.
    "SquaredDifference": _plain("computes (x - y) * (x - y)", "product", _squared),
}
"""Forms of ops that TFLite computes in float, or does not compute as they are."""

_UNCONVERTED: dict[str, Callable[[Operation], Form | None]] = {
    "AccumulateNV2": _sum,
    "ClipByValue": _plain("computes max(min(x, b), a)", "clip", _clipped),
    "EuclideanNorm": _norm,
    "Roll": _roll,
}
"""Forms of ops that the converter refuses (TensorFlow 2.21)."""


def is_refused(op: Operation) -> bool:
    """Return whether TFLite's converter refuses an op as it is."""
    return op.type in int8_kernels.REFUSED or converted_form(op) is not None


Lowered = tuple[list[str], dict[Operation, Operation]]
"""The rewrites in words; and by new ops those that they stand in for."""


def lower(
    graph: Graph,
    prelus: Sequence[Prelu],
    calls: Sequence[Operation],
    forms: Mapping[Operation, Form],
    biases: Sequence[Operation],
) -> Lowered:
    """Write ops of a plan in another form that has int8 kernels."""
    lines, stands_for = _lower_prelus(graph, prelus), dict[Operation, Operation]()
    for more, results in (
        _lower_calls(graph, calls),
        _lower_forms(graph, forms),
        _lower_biases(graph, biases),
    ):
        lines += more
        stands_for |= results
    return lines, stands_for


def _lower_prelus(graph: Graph, prelus: Sequence[Prelu]) -> list[str]:
    """Let PReLUs compute `relu(x) + alpha * min(x, 0)`, which is the same."""
    # Keras writes `relu(x) + -alpha * relu(-x)`, and TFLite negates in float only.
    if not prelus:
        return []
    stencils = Stencils(graph)
    base_names = [f"{prelu.product.name}/negative" for prelu in prelus]
    names = types.absolute_unique_names(graph, base_names)
    minima = [
        stencils.add("minimum", _minimum, name, [prelu.source], prelu.end.device)
        for prelu, name in zip(prelus, names, strict=True)
    ]
    tensor_of = stencils.make()
    edits = [
        edit
        for prelu, (minimum,) in zip(prelus, minima, strict=True)
        for edit in (
            InputEdit(prelu.product, prelu.slot, tensor_of[minimum]),
            InputEdit(prelu.product, 1 - prelu.slot, prelu.alpha),
        )
    ]
    replaced: list[Operation] = [t.op for p in prelus for t in p.product.inputs]
    apply_edits(graph, edits)
    Liveness(graph).retire(replaced, lambda op: False)
    words = "a PReLU, computes relu(x) + alpha * min(x, 0)"
    return [f"'{prelu.end.name}', {words}" for prelu in prelus]


def _lower_forms(graph: Graph, forms: Mapping[Operation, Form]) -> Lowered:
    """Replace ops that TFLite has no kernel for by their forms."""
    results = _replace(graph, list(forms.items()))
    lines = [f"'{op.name}' ({op.type}) {form.words}" for op, form in forms.items()]
    return lines, results


def _lower_calls(graph: Graph, ops: Sequence[Operation]) -> Lowered:
    """Let convolutions stand in the place of calls that are nothing else."""
    if not ops:
        return [], {}
    # Results of a function survive replacements; here they are replaced, too.
    results = results_of(graph)
    set_results(graph, [])
    done = replace_each(graph, ops, inlined_convolution, name="inlined")
    outputs = replicas.outputs_meant(graph)
    outputs[:] = map(done.current, outputs)
    set_results(graph, list(map(done.current, results)))
    lines = [f"'{op.name}' ({op.type}) is the convolution that it calls" for op in ops]
    return lines, {done.current(op.outputs[0]).op: op for op in ops}


def _lower_biases(graph: Graph, ops: Sequence[Operation]) -> Lowered:
    """Let layers add their biases before a Reshape, which is the same."""
    # A layer's kernel adds a bias before it rounds; behind a Reshape that parts the
    # channels another kernel adds it, and both round.
    forms: dict[Operation, Form] = {}
    for op in ops:
        parted = parted_bias(op)
        if parted is not None:
            words = f"is added by '{parted.data.op.name}', before a Reshape"
            key = ("bias", *(t.dtype.name for t in parted))
            forms[op] = Form(words, "early", key, _biased_early, list(parted))
    lines, by_result = _lower_forms(graph, forms)
    by_sum = {new.inputs[0].op: old for new, old in by_result.items()}
    return lines, by_result | by_sum


def _replace(
    graph: Graph, lowerings: Sequence[tuple[Operation, Form]]
) -> dict[Operation, Operation]:
    """Let forms be read in the place of ops; return the ops by their stand-ins."""
    if not lowerings:
        return {}
    stencils = Stencils(graph)
    base_names = [f"{op.name}/{form.scope}" for op, form in lowerings]
    names = types.absolute_unique_names(graph, base_names)
    results = [
        stencils.add(form.key, form.function, name, list(form.inputs), op.device)
        for (op, form), name in zip(lowerings, names, strict=True)
    ]
    tensor_of = stencils.make()
    by_tensor: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (op.outputs[0], tensor_of[result])
        for (op, _), (result,) in zip(lowerings, results, strict=True)
    )
    edits = [edit for pair in by_tensor.items() for edit in reader_edits(*pair)]
    apply_edits(graph, edits)
    set_results(graph, [by_tensor.get(t, t) for t in results_of(graph)])
    outputs = replicas.outputs_meant(graph)
    outputs[:] = [by_tensor.get(t, t) for t in outputs]
    # TensorFlow cannot remove an op, which is marked as retired.
    Liveness(graph).retire([op for op, _ in lowerings], lambda op: False)
    return {new.op: old.op for old, new in by_tensor.items()}


def _biased_early(x: tf.Tensor, bias: tf.Tensor, shape: tf.Tensor) -> list[tf.Tensor]:
    total = tf.nn.bias_add(x, tf.reshape(bias, [-1]), name="sum")
    return [tf.reshape(total, shape, name="parted")]


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]
