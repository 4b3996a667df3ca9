"""Folded layers: their values, their ops, and how they take the place of others.

The arithmetic takes numpy arrays or TensorFlow tensors, all of one kind, and uses
nothing but their operators, `reshape` and a root. A batch norm computes, channel by
channel,

    y = gamma * (x - mean) / sqrt(variance + epsilon) + beta = scale * x + offset

(Ioffe and Szegedy 2015, arXiv 1502.03167). A layer that is linear in its weights
absorbs the scale in them, and the offset in its bias (Krishnamoorthi 2018, arXiv
1806.08342, section 3.2.2).

The scale and shift behind a sum, concatenation or stack are moved before it, to each
tensor that it reads: norm(a + b) = (scale * a + offset) + scale * b; for concatenated
channels, each tensor gets its part. There they are batch norms after a single layer.

A tensor that is fetched by name, returned by a function that is being traced, or not
read yet may be held by code that does not see that it was replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.batchnorm import norms
from geutil.batchnorm.batch_statistics import Statistics, read_moving, with_moving
from geutil.batchnorm.norms import (
    AffineKind,
    AffineStep,
    Link,
    Norm,
    Start,
    axis_after,
    joined_axis,
)
from geutil.graph import adjacency, creation, op_types, state, types
from geutil.graph.edits import InputEdit, Liveness, apply_edits, results_of
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure, topological_order
from geutil.select.networks.batch_norms import MovingVariable, fused_norm
from geutil.select.networks.layers import Layer, is_by_groups

Value = Any
"""A numpy array, a TensorFlow tensor or a number."""


def rsqrt(value: Value) -> Value:
    """Return 1 / sqrt(value)."""
    if isinstance(value, np.ndarray | float):
        return 1.0 / np.sqrt(value)
    return tf.math.rsqrt(value)


def scale_and_offset(
    mean: Value,
    variance: Value,
    epsilon: float,
    gamma: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    """Return the scale and the offset of a batch norm, for each channel.

    Example:
        >>> import numpy as np
        >>> scale_and_offset(np.array([1.0]), np.array([3.0]), 1.0, np.array([4.0]))
        (array([2.]), array([-2.]))
    """
    # scale = gamma / sqrt(variance + epsilon); offset = beta - mean * scale.
    # `mean`: the mean of each channel, shape [C].
    # `variance`: its variance, biased, shape [C].
    # `gamma`: the scale after normalization, shape [C]; None is 1.
    # `beta`: the offset after normalization, shape [C]; None is 0.
    scale = rsqrt(variance + epsilon)
    if gamma is not None:
        scale = scale * gamma
    offset = -(mean * scale)
    return scale, offset if beta is None else beta + offset


def along_axes(
    value: Value, rank: int, axes: Sequence[int], sizes: Sequence[int]
) -> Value:
    """Return a vector of channels in a shape that weights can be multiplied by.

    Example:
        >>> import numpy as np
        >>> along_axes(np.arange(6.0), 4, (2, 3), (2, 3)).shape
        (1, 1, 2, 3)
    """
    # `value`: shape [C], or a scalar, which is returned as it is.
    if not value.shape.rank if isinstance(value, tf.Tensor) else not np.ndim(value):
        return value
    shape = [1] * rank
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    if isinstance(value, np.ndarray):
        return value.reshape(shape)
    # A vector goes along the last axis as it is.
    return value if tuple(axes) == (rank - 1,) else tf.reshape(value, shape)


def shift_through(weights: Value, shift: Value, output_axes: Sequence[int]) -> Value:
    """Return a layer's response to a shift of its data: the sum of weights * shift.

    Example:
        >>> import numpy as np
        >>> weights = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> shift_through(weights, np.array([[1.0], [10.0]]), [1])
        array([31., 42.])
    """
    # `shift`: the shift of each channel of the data, in a shape that broadcasts with
    # the weights.
    # `output_axes`: the axes of the weights that count the channels of the result; the
    # sum is over all others.
    # Returns a vector: the shift of each channel of the result, at the positions where
    # all of the window lies within the data.
    product = weights * shift
    if isinstance(product, np.ndarray):
        others = tuple(i for i in range(product.ndim) if i not in output_axes)
        return product.sum(others).reshape(-1)
    rank = product.shape.rank
    others = tuple(i for i in range(rank) if i not in output_axes)
    return tf.reshape(tf.reduce_sum(product, others), [-1])


class Affine:
    """The affine map of a run of steps, for each channel: x * scale + offset.

    Example:
        >>> Affine().plus(3.0).times(2.0).plus(1.0)
        Affine(2.0, 7.0)
    """

    def __init__(self, scale: Value | None = None, offset: Value | None = None) -> None:
        self.scale = scale
        self.offset = offset

    def times(self, value: Value) -> Affine:
        """Return this, then times `value`."""
        scale = value if self.scale is None else self.scale * value
        return Affine(scale, None if self.offset is None else self.offset * value)

    def plus(self, value: Value) -> Affine:
        """Return this, then plus `value`."""
        offset = value if self.offset is None else self.offset + value
        return Affine(self.scale, offset)

    def __repr__(self) -> str:
        return f"Affine({self.scale}, {self.offset})"


_PASSED_ON = frozenset(("Identity", "Snapshot", "StopGradient"))

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "BiasAdd": np.add,
    "Exp": np.exp,
    "Fill": lambda shape, x: np.full(shape.astype(np.int64), x),
    "Log": np.log,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "OnesLike": np.ones_like,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Reciprocal": np.reciprocal,
    "Rsqrt": lambda x: 1.0 / np.sqrt(x),
    "Slice": lambda x, start, size: x[int(start[0]) :][: int(size[0])],
    "Sqrt": np.sqrt,
    "Square": np.square,
    "Sub": np.subtract,
    "ZerosLike": np.zeros_like,
    "Cast": lambda x: x,
    "Reshape": lambda x, shape: np.reshape(x, shape.astype(np.int64)),
    "Transpose": lambda x, order: np.transpose(x, order.astype(np.int64)),
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis.reshape(()))),
}


def constant(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Return the value of a parameter that only constants go into, in float64."""
    # Values that the graph would round to float32 on the way are not rounded here.
    # Returns the value; None if a variable, or an op that is not known here, goes into
    # it.
    value_by_op: dict[Operation, np.ndarray[Any, Any] | None] = {}
    for op in topological_order([tensor.op], adjacency.producers):
        value_by_op[op] = _value(op, value_by_op)
    return value_by_op[tensor.op]


def _value(
    op: Operation, value_by_op: dict[Operation, np.ndarray[Any, Any] | None]
) -> np.ndarray[Any, Any] | None:
    if op.type == "Const":
        value = tf.make_ndarray(op.get_attr("value"))
        numeric = value.dtype.kind in "fiu" or value.dtype == tf.bfloat16.as_numpy_dtype
        return np.asarray(value, np.float64) if numeric else None
    inputs = [value_by_op[t.op] for t in op.inputs]
    if any(value is None for value in inputs) or len(op.outputs) != 1:
        return None
    if op.type in _PASSED_ON:
        return inputs[0]
    if op.type == "Squeeze" and inputs[0] is not None:
        return np.squeeze(inputs[0], tuple(op.get_attr("squeeze_dims")) or None)
    if op.type == "Pack":
        return np.stack(inputs, op.get_attr("axis"))  # type: ignore[arg-type]
    if op.type == "ConcatV2":
        *parts, axis = inputs
        return np.concatenate(parts, int(axis.reshape(())))  # type: ignore[arg-type,union-attr]
    function = _FUNCTIONS.get(op.type)
    return None if function is None else np.asarray(function(*inputs), np.float64)


def unrounded(tensor: Tensor) -> Tensor:
    """Return a parameter as it was before it was cast to fewer bits."""
    # Without a cast it is the tensor itself, for gradients may be asked for there.
    found = tensor
    while tensor.op.type in ("Cast", "Identity"):
        before = tensor.op.inputs[0]
        if not before.dtype.is_floating or before.dtype.size < tensor.dtype.size:
            break
        if tensor.op.type == "Cast":
            found = before
        tensor = before
    return found


def wide(dtype: tf.DType) -> tf.DType:
    """Return the type that values of a type are computed in where they are tensors."""
    return dtype if dtype == tf.float64 else tf.float32


def as_vector(value: Value) -> Value:
    """Return a parameter of channels as a vector, or a scalar as a scalar."""
    if isinstance(value, tf.Tensor):
        if value.shape.num_elements() == 1:
            return tf.reshape(value, [])
        if value.shape.rank == 1:
            return value
        if value.shape.is_fully_defined():
            # One op, where a reshape takes two.
            single = [i for i, size in enumerate(value.shape) if size == 1]
            if len(single) == value.shape.rank - 1:
                return tf.squeeze(value, single)
        return tf.reshape(value, [-1])
    return value.reshape(()) if value.size == 1 else value.reshape(-1)


def composed(steps: Sequence[AffineStep]) -> Affine | None:
    """Return the composition of steps, for each channel, as float64 arrays."""
    # None if a variable goes into them.
    values: list[list[Value]] = []
    for step in steps:
        arrays = [constant(t) for t in step.parameters]
        if any(array is None for array in arrays):
            return None
        values.append([as_vector(array) for array in arrays])
    return _composed(steps, values)


def computed(
    steps: Sequence[AffineStep], moving: Sequence[MovingVariable] = ()
) -> Affine:
    """Return the composition of steps, for each channel, as new tensors."""
    reads = [(entry.statistic, read_moving(entry)) for entry in moving]
    new = {id(statistic): read for statistic, read in reads}

    def value(tensor: Tensor) -> Tensor:
        tensor = unrounded(with_moving(tensor, reads) if reads else tensor)
        return as_vector(tf.cast(tensor, wide(tensor.dtype)))

    values = []
    for step in steps:
        parameters = list(step.parameters)
        fused = fused_norm(step.op)
        # A fused kernel in training makes its moments itself, and does not read them.
        if fused is not None:
            statistics = zip(parameters[2:], fused.moments, strict=True)
            parameters[2:] = [new.get(id(moment), read) for read, moment in statistics]
        values.append([value(t) for t in parameters])
    return _composed(steps, values)


def _composed(steps: Sequence[AffineStep], values: Sequence[Sequence[Value]]) -> Affine:
    """Return the affine map of some steps, applied one after the other."""
    affine = Affine()
    for step, parameters in zip(steps, values, strict=True):
        if step.kind is AffineKind.NORMALIZE:
            gamma, beta, mean, variance = parameters
            epsilon = float(step.op.get_attr("epsilon"))
            scale, offset = scale_and_offset(mean, variance, epsilon, gamma, beta)
            affine = affine.times(scale).plus(offset)
            continue
        (value,) = parameters
        match step.kind:
            case AffineKind.MULTIPLY:
                affine = affine.times(value)
            case AffineKind.DIVIDE:
                affine = affine.times(1.0 / value)
            case AffineKind.ADD:
                affine = affine.plus(value)
            case AffineKind.SUBTRACT:
                affine = affine.plus(-value)
            case AffineKind.SUBTRACT_FROM:
                affine = affine.times(_minus_one(value)).plus(value)
    return affine


def _minus_one(value: Value) -> Value:
    return np.float64(-1.0) if isinstance(value, np.ndarray) else -tf.ones_like(value)


SUFFIX = "_fold"


@dataclass(frozen=True, eq=False)
class Fold:
    """Batch norms, and the layer that absorbs them."""

    norms: tuple[Norm, ...]
    layer: Layer
    # Of batch norms behind the layer: the ops from the layer to the end of the last
    # norm. Of one before it: the ops from the start of the norm to the layer.
    links: tuple[Link, ...]
    # Of a norm before the layer: the ops behind the layer up to the one that adds its
    # bias; else none.
    bias: tuple[Link, ...] = ()
    forward: bool = False  # whether the norm is before the layer
    # The replacements of statistics of the batch.
    moving: tuple[MovingVariable, ...] = ()
    statistics: Statistics | None = None  # those of a norm that is folded for training

    @property
    def end(self) -> Operation:
        """The op whose result is replaced."""
        if not self.forward:
            return self.links[-1].op
        return self.bias[-1].op if self.bias else self.layer.op


def build(fold: Fold) -> Tensor:
    """Build the folded layer, and return the replacement of its end's result."""
    # The old ops are left as they are.
    return _before(fold) if fold.forward else _behind(fold)


def _behind(fold: Fold) -> Tensor:
    """Fold batch norms into the layer before them: weights * scale, and one bias."""
    layer = fold.layer
    with creation.surroundings_of(layer.op):
        affine, weights = _parameters(fold)
        if affine.scale is not None:
            scale = _like(affine.scale, weights)
            weights = weights * _spread(layer, scale, layer.outputs)
        folded = _stored(weights, layer.kernel.dtype, "weights")
        bias = filled(affine.offset, layer)
    folded_layer = copy_op(layer.op, {layer.weights: folded})
    return _finished(fold, folded_layer.outputs[0], bias, fold.links)


def _before(fold: Fold) -> Tensor:
    """Fold batch norms into the layer after them: they scale and shift its data."""
    layer = fold.layer
    with creation.surroundings_of(layer.op):
        affine, old = _parameters(fold)
        weights, bias = old, None
        if affine.scale is not None:
            scale = _like(affine.scale, old)
            weights = old * _spread(layer, scale, layer.inputs)
        # The planner folds no other than a zero shift into a layer that pads or mixes.
        if affine.offset is not None and not (layer.pads or layer.mixes):
            shift = _spread(layer, _like(affine.offset, old), layer.inputs)
            bias = shift_through(old, shift, layer.outputs)
        if fold.bias:
            added = composed([link.step for link in fold.bias if link.step])
            if added is None or not _exact(old):
                added = computed([link.step for link in fold.bias if link.step])
            bias = added.offset if bias is None else _like(added.offset, bias) + bias
        bias = filled(bias, layer)
        folded = _stored(weights, layer.kernel.dtype, "weights")
    tensor = fold.norms[0].input
    for link in fold.links:
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
        norms.hand_over_shapes(link.op.outputs[0], tensor)
    folded_layer = copy_op(layer.op, {layer.data: tensor, layer.weights: folded})
    return _finished(fold, folded_layer.outputs[0], bias, fold.bias)


def _finished(
    fold: Fold, tensor: Tensor, bias: Value | None, links: Sequence[Link]
) -> Tensor:
    """Return the result of a layer with its bias, through the ops after it."""
    axis = fold.layer.axis
    norms.hand_over_shapes(fold.layer.result, tensor)
    adding = [link for link in links if link.step and link.step.adds]
    place = adding[0] if adding else links[-1] if links else None
    for link in links:
        if link is place and bias is not None:
            tensor = add_bias(tensor, bias, axis, link)
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
            axis = _axis_after(link.op, axis)
        if link is not links[-1]:
            norms.hand_over_shapes(link.op.outputs[0], tensor)
    if bias is not None and place is None:
        tensor = add_bias(tensor, bias, axis, Link(tensor.op, 0, None))
    return tensor


def _parameters(fold: Fold) -> tuple[Affine, Value]:
    """Return the affine map of a fold's steps, and the weights of its layer."""
    # Both are arrays if nothing but constants goes into them, else tensors.
    steps = [link.step for link in fold.links if link.step]
    affine = None if fold.moving else composed(steps)
    weights = None if affine is None else constant(fold.layer.kernel)
    if affine is not None and weights is not None:
        return affine, weights
    source = unrounded(fold.layer.kernel)
    weights = tf.cast(source, wide(source.dtype))
    return computed(steps, fold.moving), weights


def _exact(value: Value) -> bool:
    return not isinstance(value, tf.Tensor)


def _like(value: Value, weights: Value) -> Value:
    return tf.cast(value, weights.dtype) if isinstance(value, tf.Tensor) else value


def _spread(layer: Layer, value: Value, axes: tuple[int, ...]) -> Value:
    sizes = layer.sizes(axes)
    rank = layer.kernel.shape.rank
    return along_axes(value, rank, axes, sizes or ())


def filled(offset: Value | None, layer: Layer) -> Value | None:
    """Return the offset as a vector of as many channels as the layer makes."""
    if offset is None:
        return None
    count = int(np.prod(layer.sizes(layer.outputs) or [1]))
    if _exact(offset):
        return np.broadcast_to(offset, (count,))
    return offset if offset.shape.rank == 1 else tf.broadcast_to(offset, [count])


def _stored(value: Value, dtype: tf.DType, name: str) -> Tensor:
    """Return a value as a tensor of the graph."""
    if isinstance(value, tf.Tensor):
        return value if value.dtype == dtype else tf.cast(value, dtype)
    return tf.constant(
        value.astype(dtype.as_numpy_dtype), dtype, name=f"{name}{SUFFIX}"
    )


def copy_op(op: Operation, inputs: Mapping[int, Tensor]) -> Operation:
    """Return a copy of an op that reads some tensors instead of its own."""
    node_def = op.node_def
    node_def.name = folded_name(op)
    copied = creation.make_op(
        op.graph, node_def, [inputs.get(i, t) for i, t in enumerate(op.inputs)]
    )
    creation.add_control_edges(copied, op.control_inputs)
    return copied


def folded_name(op: Operation) -> str:
    """Return a free name for the replacement of an op."""
    base = types.scope_basename(op.name)
    name = base if base.endswith(SUFFIX) else f"{base}{SUFFIX}"
    return types.absolute_unique_name(op.graph, f"{types.scope_dirname(op.name)}{name}")


def add_bias(tensor: Tensor, bias: Value, axis: int, place: Link) -> Tensor:
    """Return a tensor with a bias added along the axis of its channels."""
    with creation.surroundings_of(place.op):
        stored = _stored(bias, tensor.dtype, "bias")
        rank = tensor.shape.rank
        name = f"add{SUFFIX}"
        runs = not _bias_add_fails(tensor)
        if runs and axis == -1 and rank != 1:
            return tf.nn.bias_add(tensor, stored, name=name)
        if runs and rank in (4, 5) and axis == 1 - rank:
            return tf.nn.bias_add(tensor, stored, "NC" + "DHW"[5 - rank :], name=name)
        if axis != -1:
            stored = tf.reshape(stored, [-1] + [1] * (-1 - axis))
        return tf.add(tensor, stored, name=name)


def _bias_add_fails(tensor: Tensor) -> bool:
    """Return whether a BiasAdd of a tensor raises on some processors."""
    # Grappler makes a convolution and its BiasAdd one op, which without oneDNN takes no
    # groups of channels.
    op = tensor.op
    while op.type in ("Identity", "Squeeze"):
        op = op.inputs[0].op
    return op.type == "Conv2D" and is_by_groups(op)


def _axis_after(op: Operation, axis: int) -> int:
    after = axis_after(op, axis)
    return axis if after is None else after


def build_waiting(fold: Fold) -> Tensor:
    """Build the replacement of a fold, with the control inputs of its ops."""
    awaited = _awaited(fold)
    before = state.count_ops(fold.end.graph)
    result = build(fold)
    if awaited:
        new = frozenset(state.ops_since(fold.end.graph, before))
        waiting = _parameter_of(result.op, new)
        present = adjacency.control_inputs(waiting)
        creation.add_control_edges(waiting, [op for op in awaited if op not in present])
    return result


def _awaited(fold: Fold) -> list[Operation]:
    """Return the control inputs of the ops that are not copied, in graph order."""
    steps = [link.step for link in fold.links if link.step is not None]
    gone = dict.fromkeys(step.op for step in steps)
    parameters = [t for op in gone for t in op.inputs]
    data = {id(step.data) for step in steps}
    ends = [fold.layer.kernel, *(t for t in parameters if id(t) not in data)]
    gone |= closure([t.op for t in ends if t.op not in gone], adjacency.producers)
    control_inputs = dict.fromkeys(
        c for op in gone for c in adjacency.control_inputs(op)
    )
    return adjacency.graph_order(op for op in control_inputs if op not in gone)


def _parameter_of(op: Operation, new: Collection[Operation]) -> Operation:
    """Return a new op that an op reads its weights or bias from, or the op itself."""
    # TensorFlow may put a layer and its bias into one op, where an edge onto the sum
    # has no place.
    producers = (t.op for t in op.inputs[1:] if t.op in new)
    return next(producers, op)


def can_stay(fold: Fold) -> bool:
    """Return whether the end of a fold can read the folded layer: it must add."""
    link = _last(fold)
    if link is None or link.step is None:
        # The layer has no bias, and gets none if the norm shifts by nothing.
        return False
    step = link.step
    if fold.statistics is None:
        is_difference = step.op.type == "Sub" and step.index == 0
        return step.op.type in op_types.BIAS_ADDITIONS or is_difference
    if step.op.type not in op_types.ADDITIONS or step.operand is None:
        return False
    layer, shape = fold.layer, step.operand.shape
    count = prod(layer.sizes(layer.outputs) or [0])
    return bool(shape.is_fully_defined() and shape.num_elements() == count)


def held_ends(
    graph: Graph, folds: Iterable[Fold], kept_tensors: Iterable[Tensor] = ()
) -> frozenset[Operation]:
    """Return the ends of folds that outside code may hold."""
    liveness = Liveness(graph)
    named = {t.op for t in (*results_of(graph), *kept_tensors)}
    ends = (fold.end for fold in folds)
    return frozenset(end for end in ends if end in named or not liveness.readers(end))


def build_in_place(fold: Fold) -> Operation | None:
    """Fold batch norms, and make the end of the fold read the layer and its bias."""
    # Returns the end; None, and nothing is changed, if the replacement does not end in
    # a sum.
    end = fold.end
    graph = end.graph
    link = _last(fold)
    if link is None:
        return None
    state.check_editable(graph, [end])
    before = state.count_ops(graph)
    liveness = Liveness(graph)
    new_end = build_waiting(fold).op
    if new_end.type not in op_types.BIAS_ADDITIONS:
        liveness.abandon(state.ops_since(graph, before))
        return None
    let_stay(link, new_end, _for_end(end, new_end, new_end.inputs[1]), _replaced(fold))
    return end


def let_stay(
    last: Link, sum_op: Operation, bias: Tensor, replaced: Iterable[Operation]
) -> None:
    """Make the end of a fold read the folded layer and its bias."""
    end, graph = last.op, last.op.graph
    data = sum_op.inputs[0]
    edits = [InputEdit(end, last.index, data), InputEdit(end, 1 - last.index, bias)]
    apply_edits(graph, edits)
    liveness = Liveness(graph)
    liveness.abandon([sum_op])
    liveness.retire(replaced, lambda op: op is end)


def _last(fold: Fold) -> Link | None:
    """Return the link that ends a fold; None if the layer itself does."""
    links = fold.bias if fold.forward else fold.links
    return links[-1] if links else None


def _for_end(end: Operation, new_end: Operation, bias: Tensor) -> Tensor:
    """Return a bias in the form in which the end of a fold reads one."""
    channels_first = (
        new_end.type == "BiasAdd" and new_end.get_attr("data_format") != b"NHWC"
    )
    with creation.surroundings_of(end):
        if end.type != "BiasAdd" and channels_first:
            shape = [-1] + [1] * (new_end.outputs[0].shape.rank - 2)
            bias = _mapped(
                bias, lambda x: x.reshape(shape), lambda x: tf.reshape(x, shape)
            )
        if end.type == "Sub":
            bias = _mapped(bias, np.negative, tf.negative)
    return bias


def _mapped(
    bias: Tensor, of_value: Callable[[Any], Any], of_tensor: Callable[[Tensor], Tensor]
) -> Tensor:
    """Map a bias: a constant that waits for nothing becomes another constant."""
    value = None if bias.op.control_inputs else tf.get_static_value(bias)
    if value is None:
        return of_tensor(bias)
    return tf.constant(of_value(value), bias.dtype, name="bias_fold")


def _replaced(fold: Fold) -> list[Operation]:
    return [fold.layer.op, *(link.op for link in fold.links if link.op is not fold.end)]


@dataclass(eq=False)
class Branch:
    """The path from a layer, or from an op that joins branches, to the next such op."""

    start: Start
    # The ops behind that, in order; the last is the op that joins, or the last step of
    # the norm.
    links: tuple[Link, ...]
    end: Tensor  # the tensor that is joined with others, or the result of the norm
    branches: list[Branch]  # the branches joined where it begins; none at a layer
    axis: int = -1  # the axis of the channels in `end`, counted from the end
    channels: int = 0

    @property
    def join(self) -> Operation:
        """The op that joins the branches."""
        return self.start.tensor.op


@dataclass(frozen=True, eq=False)
class Branched:
    """A batch norm whose branches all end in layers."""

    norm: Norm
    tree: tuple[Branch, ...]  # its branches, each before those that it joins
    bare: bool  # whether the norm is a multiplication and an addition of constants

    @property
    def replaced(self) -> list[Operation]:
        """The ops between the branches and the end of the norm, joins included."""
        inner = [branch for branch in self.tree if branch.branches]
        return [op for b in inner for op in (b.join, *(link.op for link in b.links))]


def joins_channels(join: Operation, axis: int) -> bool:
    """Return whether an op concatenates along an axis."""
    return join.type == "ConcatV2" and joined_axis(join) == axis


def build_branches(
    branched: Branched, norm_by_end: Mapping[Operation, Norm]
) -> tuple[Tensor, list[tuple[Operation, tuple[Norm, ...]]]]:
    """Build a norm behind the layer of each branch, and join these."""
    # Batch norms that branches join on the way are taken along.
    # Returns the tensor that replaces the norm's; and the last op of each norm that was
    # built, with those that are in it.
    tree = branched.tree
    affine_by_branch: dict[int, Affine] = {id(tree[0]): Affine()}
    norms_by_branch: dict[int, tuple[Norm, ...]] = {id(tree[0]): ()}
    for branch in tree:
        if branch.branches:
            _spread_to_branches(branch, affine_by_branch)
            found = (norm_by_end.get(link.op) for link in branch.links)
            inside = tuple(norm for norm in found if norm is not None)
            inside = (*inside, *norms_by_branch[id(branch)])
            norms_by_branch |= {id(part): inside for part in branch.branches}
    ends: list[tuple[Operation, tuple[Norm, ...]]] = []
    new: dict[int, Tensor] = {}
    for branch in reversed(tree):
        with creation.surroundings_of(branch.end.op):
            if branch.branches:
                parts = enumerate(branch.branches)
                join = copy_op(branch.join, {i: new[id(b)] for i, b in parts})
                tensor = _through_links(join.outputs[0], branch)
            else:
                affine = affine_by_branch[id(branch)]
                tensor = _applied(affine, branch, shifts=branched.bare)
                ends.append((tensor.op, norms_by_branch[id(branch)]))
        new[id(branch)] = tensor
    return new[id(tree[0])], ends


def _spread_to_branches(branch: Branch, affine_by_branch: dict[int, Affine]) -> None:
    """Note the affine map of each branch that is joined where this one starts."""
    steps = [link.step for link in branch.links if link.step]
    with creation.surroundings_of(branch.end.op):
        affine = computed(steps)
        behind = affine_by_branch[id(branch)]
        if behind.scale is not None:
            affine = affine.times(behind.scale)
        if behind.offset is not None:
            affine = affine.plus(behind.offset)
        axis = axis_after(branch.join, branch.branches[0].axis)
        by_parts = axis is not None and joins_channels(branch.join, axis)
        sums = branch.join.type.startswith("Add")
        start = 0
        for i, part in enumerate(branch.branches):
            scale, offset = affine.scale, affine.offset
            if by_parts:
                scale, offset = (
                    _slice(v, start, part.channels) for v in (scale, offset)
                )
            start += part.channels
            # The terms of a sum are added up: the first one alone brings the offset.
            affine_by_branch[id(part)] = Affine(scale, None if sums and i else offset)


def _slice(value: Tensor | None, start: int, size: int) -> Tensor | None:
    if value is None or not value.shape.rank:
        return value
    return tf.slice(value, [start], [size])


def _applied(affine: Affine, branch: Branch, *, shifts: bool) -> Tensor:
    """Scale and shift the end of a branch."""
    tensor, offset = branch.end, affine.offset
    if affine.scale is not None:
        tensor = tf.multiply(tensor, _along(affine.scale, branch), name=f"mul{SUFFIX}")
        if offset is None and shifts:
            # Without a root, its shift tells a batch norm.
            offset = tf.zeros_like(affine.scale)
    if offset is not None:
        tensor = tf.add(tensor, _along(offset, branch), name=f"add{SUFFIX}")
    return tensor


def _along(value: Tensor, branch: Branch) -> Tensor:
    value = tf.cast(value, branch.end.dtype)
    if not value.shape.rank or branch.axis == -1:
        return value
    return tf.reshape(value, [-1] + [1] * (-1 - branch.axis))


def _through_links(tensor: Tensor, branch: Branch) -> Tensor:
    """Apply the ops of a branch that only forward channels to a new tensor."""
    for link in branch.start.links:
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
    return tensor
