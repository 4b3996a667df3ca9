"""Folded layers: their ops, those whose result is requested, and their control inputs.

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

from geutil.batchnorm import fold_arithmetic, norms
from geutil.batchnorm.batch_statistics import Statistics
from geutil.batchnorm.fold_arithmetic import Affine, Value
from geutil.batchnorm.norms import Link, Norm, axis_after
from geutil.graph import adjacency, creation, op_types, state, types
from geutil.graph.edits import InputEdit, Liveness, apply_edits, results_of
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.select.networks.batch_norms import MovingVariable
from geutil.select.networks.layers import Layer, is_by_groups

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
            bias = fold_arithmetic.shift_through(old, shift, layer.outputs)
        if fold.bias:
            added = fold_arithmetic.composed(
                [link.step for link in fold.bias if link.step]
            )
            if added is None or not _exact(old):
                added = fold_arithmetic.computed(
                    [link.step for link in fold.bias if link.step]
                )
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
    affine = None if fold.moving else fold_arithmetic.composed(steps)
    weights = None if affine is None else fold_arithmetic.constant(fold.layer.kernel)
    if affine is not None and weights is not None:
        return affine, weights
    source = fold_arithmetic.unrounded(fold.layer.kernel)
    weights = tf.cast(source, fold_arithmetic.wide(source.dtype))
    return fold_arithmetic.computed(steps, fold.moving), weights


def _exact(value: Value) -> bool:
    return not isinstance(value, tf.Tensor)


def _like(value: Value, weights: Value) -> Value:
    return tf.cast(value, weights.dtype) if isinstance(value, tf.Tensor) else value


def _spread(layer: Layer, value: Value, axes: tuple[int, ...]) -> Value:
    sizes = layer.sizes(axes)
    rank = layer.kernel.shape.rank
    return fold_arithmetic.along_axes(value, rank, axes, sizes or ())


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
