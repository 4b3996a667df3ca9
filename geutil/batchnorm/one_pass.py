"""Layers folded for training that run once: statistics of their folded results.

With s(v) = sqrt(v + epsilon), weights take in scale = gamma / s(moving variance), and
are quantized so. The statistics of the batch are taken of the layer's result with them,
z, and divided by the scale:

    mean     = mean(z) / scale variance = variance(z) / scale^2 y        = z * (gamma /
    s(variance)) / scale + beta - gamma * mean / s(variance)

That is the batch norm in training of a layer with the weights quantized(weights *
scale) / scale, for any scale (after Krishnamoorthi 2018, arXiv 1806.08342, section
3.2.2, which takes them of a layer that runs beside it). So the scale carries no
gradients: those of gamma go through the product behind the layer, where they are exact,
and moving statistics have none. From the freeze on it is

    y = z * gamma / s(moving variance) / scale + beta
        - gamma * moving mean / s(moving variance)

where the product is 1, but for the gradients of gamma.

A gamma of zero, with which blocks start that shall do nothing at first, would leave
nothing to measure, and nothing to learn from. The scale takes 2^-10 for one that is
smaller, and the product behind the layer the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from geutil.batchnorm import fold_arithmetic, norm_path
from geutil.batchnorm.batch_statistics import Statistics
from geutil.batchnorm.build import add_bias, copy_op, filled
from geutil.batchnorm.channel_affine import Link, axis_after
from geutil.batchnorm.fold_arithmetic import Affine, Value
from geutil.batchnorm.training_build import (
    Built,
    BuiltNorm,
    Corrected,
    Freeze,
    TrainingFold,
    averaged,
    beside,
    like,
    rescaled,
    scaled_weights,
    scaling,
    steps_before,
    unbiased,
    with_statistics,
)
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.types import Tensor
from geutil.rewrite.liveness import Liveness
from geutil.select.networks.moving_averages import base_of

LEAST_GAMMA = 2.0**-10
"""The least gamma that weights are scaled by."""


class Measured(NamedTuple):
    """The statistics of a norm's input, taken of a layer with scaled weights."""

    mean: Tensor
    variance: Tensor
    count: Tensor  # how many values each is of, an int64 scalar


def corrected(
    scale: Value, batch: Affine, moving: Affine, frozen: Value | None
) -> Corrected:
    """Return the corrections of a layer that runs once.

    Example:
        >>> import tensorflow as tf
        >>> batch = Affine(tf.constant([6.0]), tf.constant([1.0]))
        >>> moving = Affine(tf.constant([3.0]), tf.constant([5.0]))
        >>> for frozen in (False, True):
        ...     made = corrected(moving.scale, batch, moving, tf.constant(frozen))
        ...     print([float(value[0]) for value in made])
        [3.0, 2.0, 1.0]
        [3.0, 1.0, 5.0]
    """
    # `scale`: the factor of its weights, shape [C].
    if frozen is None:
        return Corrected(scale, batch.scale / scale, batch.offset)
    chosen = tf.where(frozen, moving.scale, batch.scale)
    return Corrected(
        scale, chosen / scale, tf.where(frozen, moving.offset, batch.offset)
    )


def scale_for_weights(scale: Value, made: BuiltNorm) -> Value:
    """Return the scale of a norm without gradients, and never near zero.

    Example:
        >>> import tensorflow as tf
        >>> made = BuiltNorm((), tf.constant([0.5, 0.5, 0.5]), False)
        >>> scale = tf.constant([-2.0, 0.0, -1e-9])
        >>> (1024 * scale_for_weights(scale, made)).numpy().tolist()
        [-2048.0, 0.5, 0.5]
    """
    least = 1.0 / made.deviation if made.inverted else made.deviation
    least = least * LEAST_GAMMA
    return tf.stop_gradient(tf.where(tf.abs(scale) < least, least, scale))


def build_one_pass(
    fold: TrainingFold, freeze: Freeze, *, end_stays: bool = False
) -> Built:
    """Build the folded layer, whose result the statistics of the batch are taken of."""
    statistics = fold.statistics
    average = statistics.moving_mean
    moving = with_statistics(
        statistics,
        None if average is None else average.value,
        statistics.moving_variance.value,
    )
    frozen = None if freeze is None else freeze()
    before = steps_before(fold)
    with beside(fold.end):
        needed = scaling(before) if frozen is None else before
        deployed = fold_arithmetic.computed([*needed, *moving.steps])
        scale = scale_for_weights(deployed.scale, moving)
    tensor, axis, shapes = _layer(fold, scale)
    with beside(fold.end):
        added = fold_arithmetic.computed(before)
        measured = _measured(tensor, axis, scale, added)
    batch = with_statistics(statistics, measured.mean, measured.variance)
    with beside(fold.end):
        current = fold_arithmetic.computed([*before, *batch.steps])
        values = corrected(scale, current, deployed, frozen)
    place = fold.links[-1] if end_stays else _start(fold)
    tensor = rescaled(tensor, values.result, axis, place)
    tensor = add_bias(tensor, filled(values.bias, fold.layer), axis, place)
    rest: list[Tensor | None] = [None] * (len(fold.end.outputs) - 1)
    fused = statistics.norm.fused
    with beside(fold.end):
        if fused is None:
            pairs = _pairs(statistics, measured)
        else:
            count = tf.cast(measured.count, measured.variance.dtype)
            whole = unbiased(measured.variance, count)
            rest[:2] = averaged(fused, measured.mean, whole)
            pairs = ()
    return Built(tensor, tuple(rest), moving.deviation.op, pairs, shapes)


def settle_statistics(fold: TrainingFold, built: Built) -> None:
    """Let moving averages follow the measured statistics, and retire the old layer."""
    # If somebody else reads that it goes on being computed.
    graph = fold.end.graph
    for old, new in built.shapes:
        norm_path.hand_over_shapes(old, new)
    edits = [
        InputEdit(reader, index, new)
        for old, new in built.statistics
        for reader in dict.fromkeys(old.consumers())
        for index, t in enumerate(reader.inputs)
        if t is old
    ]
    if edits:
        apply_edits(graph, edits)
    replaced = [old.op for old, _ in (*built.statistics, *built.shapes)]
    Liveness(graph).retire(replaced, lambda op: False)


def _layer(
    fold: TrainingFold, scale: Value
) -> tuple[Tensor, int, tuple[tuple[Tensor, Tensor], ...]]:
    """Copy a layer with scaled weights, and the ops between it and the norm."""
    # Returns the norm's input, scaled and without a bias; the axis of the channels; old
    # tensors, and new ones of the same shapes.
    layer = fold.layer
    weights = scaled_weights(layer, scale)
    tensor = copy_op(layer.op, {layer.weights: weights}).outputs[0]
    axis, shapes = layer.axis, [(layer.result, tensor)]
    # Steps of the path are in the weights and the bias by now.
    for link in fold.links:
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
            axis = axis_after(link.op, axis) or axis
        if link is not fold.links[-1]:
            shapes.append((link.op.outputs[0], tensor))
    return tensor, axis, tuple(shapes)


def _measured(tensor: Tensor, axis: int, scale: Value, added: Affine) -> Measured:
    """Return the statistics of a norm's input."""
    # They end in a division by a tensor without gradients, by which stripping finds
    # them: see `geutil.select.networks.batch_norms.measured_moment`.
    # `scale`: shape [C].
    rank = tensor.shape.rank
    axes = [i for i in range(rank) if i != axis % rank]
    wide = tf.cast(tensor, scale.dtype)
    mean = tf.reduce_mean(wide, axes, name="batch_mean")
    around = tf.reshape(tf.stop_gradient(mean), [-1] + [1] * (-1 - axis))
    # One op for both is several times slower than these two where it broadcasts.
    squares = tf.square(wide - around)
    variance = tf.reduce_mean(squares, axes, name="batch_variance")
    count = tf.size(tensor, tf.int64) // tf.size(mean, tf.int64)
    if added.scale is not None:
        mean, variance = mean * added.scale, variance * tf.square(added.scale)
    if added.offset is not None:
        mean = mean + added.offset * scale
    square = tf.stop_gradient(tf.square(scale))
    return Measured(mean / scale, variance / square, count)


def _start(fold: TrainingFold) -> Link:
    """Return the link where the norm begins."""
    first = fold.statistics.norm.steps[0].op
    return next(link for link in fold.links if link.op is first)


def _pairs(
    statistics: Statistics, measured: Measured
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the statistics of the graph, as it computes them, and those measured."""
    return tuple(
        (base, like(new, base))
        for base, new in (
            (base_of(statistics.mean), measured.mean),
            (base_of(statistics.variance), measured.variance),
        )
    )
