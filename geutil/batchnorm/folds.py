"""Builds what stands in for a layer and its batch norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.batchnorm.arithmetic import (
    Affine,
    Value,
    along_axes,
    scale_and_offset,
    shift_through,
)
from geutil.batchnorm.layers import Layer
from geutil.batchnorm.norms import Norm
from geutil.batchnorm.passing import axis_after
from geutil.batchnorm.paths import Link
from geutil.batchnorm.steps import Kind, Step
from geutil.batchnorm.values import as_vector, constant, unrounded
from geutil.graph.importing import add_control_edges, make_op
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.names import absolute_unique_name, scope_basename, scope_dirname
from geutil.graph.surroundings import surroundings_of

SUFFIX = "_fold"


@dataclass(frozen=True, eq=False)
class Fold:
    """Batch norms, and the layer that takes them in.

    Attributes:
        norms: the norms.
        layer: the layer.
        links: of norms behind the layer: the ops from the layer to the end of the last
            norm. Of one before it: the ops from the start of the norm to the layer.
        bias: of a norm before the layer: what adds the layer's bias; else None.
        forward: whether the norm is before the layer.
    """

    norms: tuple[Norm, ...]
    layer: Layer
    links: tuple[Link, ...]
    bias: Link | None = None
    forward: bool = False

    @property
    def end(self) -> Operation:
        """The op whose result is replaced."""
        if not self.forward:
            return self.links[-1].op
        return self.layer.op if self.bias is None else self.bias.op


def build(fold: Fold) -> Tensor:
    """Build the folded layer, and return what replaces the result of its end.

    The old ops are left as they are.
    """
    return _before(fold) if fold.forward else _behind(fold)


def _behind(fold: Fold) -> Tensor:
    """Fold norms into the layer before them: weights * scale, and one bias."""
    layer, links = fold.layer, fold.links
    exact = _all_constant(layer, links)
    with surroundings_of(layer.op):
        affine = composed([link.step for link in links if link.step], exact)
        weights = _weights(layer, exact)
        if affine.scale is not None:
            scale = _like(affine.scale, weights)
            weights = weights * _spread(layer, scale, layer.outputs)
        bias = _filled(affine.offset, layer, weights)
        folded = _stored(weights, layer.kernel.dtype, "weights")
    tensor = copy_op(layer.op, {layer.weights: folded}).outputs[0]
    place = next((link for link in links if link.step and link.step.adds), links[-1])
    axis = layer.axis
    for link in links:
        if link is place:
            tensor = add_bias(tensor, bias, axis, link)
        elif link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
        if link.step is None:
            axis = _axis_after(link.op, axis)
    return tensor


def _before(fold: Fold) -> Tensor:
    """Fold a norm into the layer behind it: its scale and shift are the data's."""
    layer, links = fold.layer, fold.links
    exact = _all_constant(layer, links)
    with surroundings_of(layer.op):
        affine = composed([link.step for link in links if link.step], exact)
        old = weights = _weights(layer, exact)
        if affine.scale is not None:
            scale = _like(affine.scale, weights)
            weights = weights * _spread(layer, scale, layer.inputs)
        offset = None
        if affine.offset is not None:
            shift = _spread(layer, _like(affine.offset, old), layer.inputs)
            offset = shift_through(old, shift, layer.outputs)
        if fold.bias is not None and fold.bias.step is not None:
            step = fold.bias.step
            before = composed([step], exact).offset
            offset = before if offset is None else before + offset
        folded = _stored(weights, layer.kernel.dtype, "weights")
    tensor = fold.norms[0].input
    for link in links:
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
    made = copy_op(layer.op, {layer.data: tensor, layer.weights: folded}).outputs[0]
    if offset is None:
        return made
    place = fold.bias or Link(layer.op, 0, None)
    return add_bias(made, offset, layer.axis, place)


def composed(steps: Sequence[Step], exact: bool) -> Affine:
    """Return what steps do to each channel, one after the other.

    Args:
        steps: the steps.
        exact: compute with float64 arrays: all operands are constants.
    """
    affine = Affine()
    for step in steps:
        if step.kind is Kind.NORMALIZE:
            gamma, beta, mean, variance = (
                _value(t, exact) for t in step.op.inputs[1:5]
            )
            epsilon = float(step.op.get_attr("epsilon"))
            scale, offset = scale_and_offset(mean, variance, epsilon, gamma, beta)
            affine = affine.times(scale).plus(offset)
            continue
        if step.operand is None:
            continue
        value = _value(step.operand, exact)
        match step.kind:
            case Kind.MULTIPLY:
                affine = affine.times(value)
            case Kind.DIVIDE:
                affine = affine.times(1.0 / value)
            case Kind.ADD:
                affine = affine.plus(value)
            case Kind.SUBTRACT:
                affine = affine.plus(-value)
            case Kind.SUBTRACT_FROM:
                affine = affine.times(_minus_one(value)).plus(value)
    return affine


def _minus_one(value: Value) -> Value:
    return np.float64(-1.0) if isinstance(value, np.ndarray) else -tf.ones_like(value)


def _value(tensor: Tensor, exact: bool) -> Value:
    if not exact:
        tensor = unrounded(tensor)
        return as_vector(tf.cast(tensor, _wide(tensor.dtype)))
    value = constant(tensor)
    return np.zeros(()) if value is None else as_vector(value)


def _wide(dtype: tf.DType) -> tf.DType:
    return dtype if dtype == tf.float64 else tf.float32


def _all_constant(layer: Layer, links: Sequence[Link]) -> bool:
    operands = [layer.kernel]
    for link in links:
        if link.step is None:
            continue
        if link.step.operand is None:
            operands += link.step.op.inputs[1:5]
        else:
            operands.append(link.step.operand)
    return all(constant(t) is not None for t in operands)


def _weights(layer: Layer, exact: bool) -> Value:
    value = constant(layer.kernel) if exact else None
    if value is not None:
        return value
    source = unrounded(layer.kernel)
    return tf.cast(source, _wide(source.dtype))


def _like(value: Value, weights: Value) -> Value:
    return tf.cast(value, weights.dtype) if isinstance(value, tf.Tensor) else value


def _spread(layer: Layer, value: Value, axes: tuple[int, ...]) -> Value:
    sizes = layer.sizes(axes)
    rank = layer.kernel.shape.rank
    return along_axes(value, rank, axes, sizes or ())


def _filled(offset: Value | None, layer: Layer, weights: Value) -> Value:
    """Return the offset as a vector of as many channels as the layer makes."""
    count = int(np.prod(layer.sizes(layer.outputs) or [1]))
    if isinstance(weights, np.ndarray):
        return np.broadcast_to(np.zeros(()) if offset is None else offset, (count,))
    if offset is None:
        return np.zeros((count,))
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
