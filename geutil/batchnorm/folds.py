"""Builds what stands in for a layer and its batch norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.batchnorm.arithmetic import Affine, Value, along_axes, shift_through
from geutil.batchnorm.composing import composed, computed
from geutil.batchnorm.links import Link
from geutil.batchnorm.moving import Moving
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.passing import axis_after
from geutil.batchnorm.shapes import hand_over_shapes
from geutil.batchnorm.values import constant, unrounded, wide
from geutil.graph.importing import add_control_edges, make_op
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.names import absolute_unique_name, scope_basename, scope_dirname
from geutil.graph.surroundings import surroundings_of
from geutil.select.networks.layers import Layer

SUFFIX = "_fold"


@dataclass(frozen=True, eq=False)
class Fold:
    """Batch norms, and the layer that takes them in.

    Attributes:
        norms: the norms.
        layer: the layer.
        links: of norms behind the layer: the ops from the layer to the end of the last
            norm. Of one before it: the ops from the start of the norm to the layer.
        bias: of a norm before the layer: the ops behind the layer up to the one that
            adds its bias; else none.
        forward: whether the norm is before the layer.
        moving: what stands in for statistics of the batch.
    """

    norms: tuple[Norm, ...]
    layer: Layer
    links: tuple[Link, ...]
    bias: tuple[Link, ...] = ()
    forward: bool = False
    moving: tuple[Moving, ...] = ()

    @property
    def end(self) -> Operation:
        """The op whose result is replaced."""
        if not self.forward:
            return self.links[-1].op
        return self.bias[-1].op if self.bias else self.layer.op


def build(fold: Fold) -> Tensor:
    """Build the folded layer, and return what replaces the result of its end.

    The old ops are left as they are.
    """
    return _before(fold) if fold.forward else _behind(fold)


def _behind(fold: Fold) -> Tensor:
    """Fold norms into the layer before them: weights * scale, and one bias."""
    layer = fold.layer
    with surroundings_of(layer.op):
        affine, weights = _parameters(fold)
        if affine.scale is not None:
            scale = _like(affine.scale, weights)
            weights = weights * _spread(layer, scale, layer.outputs)
        folded = _stored(weights, layer.kernel.dtype, "weights")
        bias = filled(affine.offset, layer)
    made = copy_op(layer.op, {layer.weights: folded})
    return _finished(fold, made.outputs[0], bias, fold.links)


def _before(fold: Fold) -> Tensor:
    """Fold norms into the layer behind them: their scale and shift are the data's."""
    layer = fold.layer
    with surroundings_of(layer.op):
        affine, old = _parameters(fold)
        weights, bias = old, None
        if affine.scale is not None:
            scale = _like(affine.scale, old)
            weights = old * _spread(layer, scale, layer.inputs)
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
        hand_over_shapes(link.op.outputs[0], tensor)
    made = copy_op(layer.op, {layer.data: tensor, layer.weights: folded})
    return _finished(fold, made.outputs[0], bias, fold.bias)


def _finished(
    fold: Fold, tensor: Tensor, bias: Value | None, links: Sequence[Link]
) -> Tensor:
    """Return what a layer makes with its bias, and through the ops behind it."""
    axis = fold.layer.axis
    hand_over_shapes(fold.layer.result, tensor)
    adding = [link for link in links if link.step and link.step.adds]
    place = adding[0] if adding else links[-1] if links else None
    for link in links:
        if link is place and bias is not None:
            tensor = add_bias(tensor, bias, axis, link)
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
            axis = _axis_after(link.op, axis)
        if link is not links[-1]:
            hand_over_shapes(link.op.outputs[0], tensor)
    if bias is not None and place is None:
        tensor = add_bias(tensor, bias, axis, Link(tensor.op, 0, None))
    return tensor


def _parameters(fold: Fold) -> tuple[Affine, Value]:
    """Return what the steps of a fold do, and the weights of its layer.

    Both are arrays if nothing but constants goes into them, else tensors.
    """
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
    copied = make_op(
        op.graph, node_def, [inputs.get(i, t) for i, t in enumerate(op.inputs)]
    )
    add_control_edges(copied, op.control_inputs)
    return copied


def folded_name(op: Operation) -> str:
    """Return a free name for what stands in for an op."""
    base = scope_basename(op.name)
    name = base if base.endswith(SUFFIX) else f"{base}{SUFFIX}"
    return absolute_unique_name(op.graph, f"{scope_dirname(op.name)}{name}")


def add_bias(tensor: Tensor, bias: Value, axis: int, place: Link) -> Tensor:
    """Return a tensor with a bias added along the axis of its channels.

    Args:
        tensor: the tensor.
        bias: a vector of channels.
        axis: the axis, counted from the end.
        place: whose scope and device the new op gets.
    """
    with surroundings_of(place.op):
        stored = _stored(bias, tensor.dtype, "bias")
        rank = tensor.shape.rank
        name = f"add{SUFFIX}"
        if axis == -1 and rank != 1:
            return tf.nn.bias_add(tensor, stored, name=name)
        if rank is not None and axis == 1 - rank and rank in (4, 5):
            return tf.nn.bias_add(tensor, stored, "NC" + "DHW"[5 - rank :], name=name)
        shape = [-1] + [1] * (-1 - axis)
        return tf.add(tensor, tf.reshape(stored, shape), name=name)


def _axis_after(op: Operation, axis: int) -> int:
    after = axis_after(op, axis)
    return axis if after is None else after
