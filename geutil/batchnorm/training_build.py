"""Layers folded for training: statistics of the batch, corrections, new ops.

A batch norm in training computes, with s(v) = sqrt(v + epsilon),

    y = gamma * (x - mean) / s(variance) + beta

with the statistics of the batch. Weights that took in gamma / s(variance) would jump
from batch to batch, and with them their ranges when they are quantized. So the weights
take in gamma / s(moving variance) instead, and the difference is put right behind the
layer (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2, figures 7 and 8). There:

    correction_scale  = s(variance) / s(moving variance) correction_offset = gamma *
    (mean / s(variance) - moving mean / s(moving variance))

The scale multiplies the weights that are folded with the batch's statistics,

    weights * gamma / s(variance) * correction_scale = weights * gamma / s(moving
    variance),

and its reciprocal the result of the layer. In this product s(variance) cancels. It is
left out from the start: it would add rounding, and gradients that cancel too.

Until the freeze the layer's result is divided by the scale and the bias is beta - gamma
* mean / s(variance): the batch norm as it was. From the freeze on nothing is divided,
and the correction offset is added to that bias, in which the batch's mean cancels in
turn: beta - gamma * moving mean / s(moving variance) is left, the batch norm as it will
be deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import tensorflow as tf

from geutil.batchnorm import fold_arithmetic
from geutil.batchnorm.batch_statistics import Statistics
from geutil.batchnorm.build import SUFFIX, Fold, add_bias, copy_op, filled
from geutil.batchnorm.channel_affine import AffineKind, AffineStep, Link, axis_after
from geutil.batchnorm.fold_arithmetic import Affine, Value
from geutil.graph import adjacency, creation
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import closure
from geutil.select.networks.batch_norms import FusedNorm
from geutil.select.networks.layers import Layer, data_format


class Corrected(NamedTuple):
    """The corrected layer."""

    weights: Value  # the factor of its weights, shape [C]
    # The factor of its result, shape [C]: 1 / correction_scale until the freeze, 1 from
    # then on.
    result: Value
    bias: Value  # the term added then, shape [C]


def corrected(
    batch: Affine, moving: Affine, ratio: Value, frozen: Value | None
) -> Corrected:
    """Return the corrections of a layer whose batch norm is folded for training.

    Example:
        >>> import tensorflow as tf
        >>> batch = Affine(tf.constant([6.0]), tf.constant([1.0]))
        >>> moving = Affine(tf.constant([3.0]), tf.constant([5.0]))
        >>> for frozen in (False, True):
        ...     made = corrected(batch, moving, tf.constant([2.0]), tf.constant(frozen))
        ...     print([float(value[0]) for value in made])
        [3.0, 2.0, 1.0]
        [3.0, 1.0, 5.0]
    """
    # `ratio`: s(moving variance) / s(variance), the reciprocal of correction_scale,
    # shape [C]. It is not made of the two scales: gamma may be zero.
    if frozen is None:
        return Corrected(moving.scale, ratio, batch.offset)
    return Corrected(
        moving.scale,
        tf.where(frozen, tf.ones_like(ratio), ratio),
        tf.where(frozen, moving.offset, batch.offset),
    )


def unbiased(variance: Value, count: Value) -> Value:
    """Return a variance with Bessel's correction: variance * count / (count - 1).

    Example:
        >>> import tensorflow as tf
        >>> float(unbiased(tf.constant(3.0), tf.constant(4.0)))
        4.0
    """
    return variance * (count / tf.maximum(count - 1, 1))


@dataclass(frozen=True, eq=False)
class BuiltNorm:
    """A norm with some statistics."""

    steps: tuple[AffineStep, ...]
    deviation: Tensor  # 1 / s of the variance, or s if `inverted`; a vector of channels
    inverted: bool  # whether the graph divides by the root

    def ratio_to(self, other: BuiltNorm) -> Value:
        """Return s of the other's variance / s of this one's."""
        if self.inverted:
            return other.deviation / self.deviation
        return self.deviation / other.deviation


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of a batch, computed with gradients."""

    # A fused op hands no gradients to its statistics, so they are computed beside it.

    mean: Tensor
    variance: Tensor
    # Of a fused op, the statistics that it returns; else None.
    results: tuple[Tensor, Tensor] | None = None


def moments_of(statistics: Statistics) -> Moments:
    """Return the statistics of the batch, built where a fused op has none."""
    fused = statistics.norm.fused
    if fused is None:
        return Moments(statistics.mean, statistics.variance)
    op, data = fused.op, statistics.norm.input
    layout = data_format(op)
    axis, rank = layout.index("C"), len(layout)
    axes = [i for i in range(rank) if i != axis]
    with beside(op):
        wide = tf.cast(data, statistics.mean.dtype)
        mean = tf.reduce_mean(wide, axes, name="batch_mean")
        shape = [-1] + [1] * (rank - 1 - axis)
        apart = tf.math.squared_difference(
            wide, tf.reshape(tf.stop_gradient(mean), shape)
        )
        variance = tf.reduce_mean(apart, axes, name="batch_variance")
        count = tf.size(data, tf.int64) // tf.size(mean, tf.int64)
        whole = unbiased(variance, tf.cast(count, variance.dtype))
        return Moments(mean, variance, averaged(fused, mean, whole))


def averaged(norm: FusedNorm, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics that a fused op returns; no gradients go through them."""
    factor = norm.averaging_factor
    results = []
    for old_average, value in zip(norm.given, (mean, variance), strict=True):
        if factor != 1.0:
            value = old_average * (1.0 - factor) + value * factor
        results.append(tf.stop_gradient(value))
    return results[0], results[1]


def with_statistics(
    statistics: Statistics, mean: Tensor | None, variance: Tensor
) -> BuiltNorm:
    """Build a norm with other statistics than those of the graph."""
    # `mean`: the mean to take, a vector of channels; None leaves out all steps that
    # only add.
    norm = statistics.norm
    steps = norm.steps if mean is not None else scaling(norm.steps)
    with beside(norm.result.op):
        if norm.fused is not None:
            return _fused(steps[0], mean, variance)
        replaced = {id(statistics.variance): like(variance, statistics.variance)}
        if mean is not None:
            replaced[id(statistics.mean)] = like(mean, statistics.mean)
    return _copied(statistics, steps, replaced)


def as_it_is(statistics: Statistics, moments: Moments) -> BuiltNorm:
    """Return a norm with the statistics of the batch."""
    if statistics.norm.fused is not None:
        return with_statistics(statistics, moments.mean, moments.variance)
    return _copied(statistics, statistics.norm.steps, {})


def scaling(steps: Sequence[AffineStep]) -> tuple[AffineStep, ...]:
    """Return the steps that do more than add."""
    return tuple(
        s for s in steps if s.kind not in (AffineKind.ADD, AffineKind.SUBTRACT)
    )


@contextmanager
def beside(op: Operation) -> Iterator[None]:
    """Make the ops of the block in a scope of their own beside an op."""
    with creation.surroundings_of(op), tf.name_scope("training_fold"):
        yield


def _fused(step: AffineStep, mean: Tensor | None, variance: Tensor) -> BuiltNorm:
    gamma, beta = step.op.inputs[1:3]
    root = tf.math.rsqrt(variance + float(step.op.get_attr("epsilon")))
    scale = root * gamma
    # No ops do these steps yet; those of the operands are taken.
    steps = [AffineStep(scale.op, AffineKind.MULTIPLY, 0, scale, step.axis)]
    if mean is not None:
        offset = beta - mean * scale
        steps.append(AffineStep(offset.op, AffineKind.ADD, 0, offset, step.axis))
    return BuiltNorm(tuple(steps), root, False)


def _copied(
    statistics: Statistics, steps: Sequence[AffineStep], replaced: dict[int, Tensor]
) -> BuiltNorm:
    """Copy the ops between the statistics and the steps."""
    root = statistics.root
    operands = [s.operand for s in steps if s.operand is not None]
    replacement_by_id = dict(replaced)
    ends = [*(t.op for t in operands), root] if replaced else []
    for op in _between(ends, (statistics.mean, statistics.variance)):
        inputs = {
            i: replacement_by_id[id(t)]
            for i, t in enumerate(op.inputs)
            if id(t) in replacement_by_id
        }
        if inputs:
            for old, new in zip(op.outputs, copy_op(op, inputs).outputs, strict=True):
                replacement_by_id[id(old)] = new
    deviation = replacement_by_id.get(id(root.outputs[0]), root.outputs[0])
    with beside(root):
        vector = fold_arithmetic.as_vector(deviation)
    return BuiltNorm(
        tuple(
            s
            if s.operand is None
            else replace(s, operand=replacement_by_id.get(id(s.operand), s.operand))
            for s in steps
        ),
        vector,
        not _is_inverse(root),
    )


def _between(ends: Sequence[Operation], starts: Sequence[Tensor]) -> list[Operation]:
    """Return the ops behind `ends`, up to `starts`, in topological order."""
    stops = {id(t) for t in starts}
    ops = closure(ends, lambda op: [t.op for t in op.inputs if id(t) not in stops])
    return adjacency.topological_sort(ops)


def _is_inverse(root: Operation) -> bool:
    if root.type == "Pow":
        return bool(tf.get_static_value(root.inputs[1]) < 0)
    return root.type == "Rsqrt"


def like(value: Tensor, statistic: Tensor) -> Tensor:
    """Return a value of channels in the shape and type of a statistic."""
    return tf.reshape(tf.cast(value, statistic.dtype), statistic.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingFold(Fold):
    """A batch norm in training, and the layer that takes it in."""

    statistics: Statistics  # the statistics that the norm normalizes by


@dataclass(frozen=True, eq=False)
class Built:
    """The ops built for a fold."""

    result: Tensor  # the result of the folded layer, with its bias
    # The replacements of further outputs of the fold's end; None for those that stay.
    rest: tuple[Tensor | None, ...]
    # The op that had the root of the moving variance, and no longer reads it.
    root: Operation
    # Statistics of the batch, and their replacements.
    statistics: tuple[tuple[Tensor, Tensor], ...] = ()
    # Tensors of the old layer, and new ones of the same shapes.
    shapes: tuple[tuple[Tensor, Tensor], ...] = ()


Freeze = Callable[[], Tensor] | None
"""Returns whether the freeze has come; None if it never does."""


def build_training(
    fold: TrainingFold, freeze: Freeze, *, end_stays: bool = False
) -> Built:
    """Build the folded layer beside the old one, which goes on making statistics."""
    # `end_stays`: end in the sum, as the fold does; else the sum is where the first one
    # was, the layer's bias perhaps.
    statistics = fold.statistics
    moments = moments_of(statistics)
    batch = as_it_is(statistics, moments)
    average = statistics.moving_mean
    moving = with_statistics(
        statistics,
        None if average is None else average.value,
        statistics.moving_variance.value,
    )
    frozen = None if freeze is None else freeze()
    with beside(fold.end):
        before = steps_before(fold)
        needed = scaling(before) if frozen is None else before
        values = corrected(
            fold_arithmetic.computed([*before, *batch.steps]),
            fold_arithmetic.computed([*needed, *moving.steps]),
            batch.ratio_to(moving),
            frozen,
        )
    adding = (link for link in fold.links if link.step and link.step.adds)
    last = fold.links[-1]
    result = _layer(fold, values, last if end_stays else next(adding, last))
    return Built(result, _rest(fold, moments), moving.deviation.op)


def settle(fold: TrainingFold, built: Built, freeze: Freeze) -> None:
    """Stop the moving averages at the freeze, and let ref variables be read first."""
    statistics = fold.statistics
    graph = fold.end.graph
    variance = statistics.moving_variance
    if variance.is_reference:
        waits = (*variance.update.control_inputs, built.root)
        apply_edits(graph, controls=[ControlEdit(variance.update, waits)])
    if freeze is None:
        return
    for moving in (statistics.moving_mean, variance):
        if moving is None:
            continue
        update = moving.update
        value = update.inputs[1]
        with creation.surroundings_of(update):
            frozen_value = moving.value if moving.replaces else tf.zeros_like(value)
            chosen = tf.where(freeze(), frozen_value, value, name=f"frozen{SUFFIX}")
        apply_edits(graph, [InputEdit(update, 1, chosen)])


def steps_before(fold: TrainingFold) -> tuple[AffineStep, ...]:
    """Return the steps between the layer and the norm, such as a bias."""
    inside = {step.op for step in fold.statistics.norm.steps}
    steps = (link.step for link in fold.links)
    return tuple(s for s in steps if s is not None and s.op not in inside)


def _layer(fold: TrainingFold, values: Corrected, place: Link) -> Tensor:
    """Copy a layer with corrected weights, and the path from it to the norm."""
    layer, links = fold.layer, fold.links
    weights = scaled_weights(layer, values.weights)
    tensor = copy_op(layer.op, {layer.weights: weights}).outputs[0]
    axis = layer.axis
    # Steps of the path are in the weights and the bias by now; ops that only move
    # or reshape data are copied.
    for link in links:
        if link is place:
            tensor = rescaled(tensor, values.result, axis, link)
            tensor = add_bias(tensor, filled(values.bias, layer), axis, link)
        elif link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
        if link.step is None:
            axis = axis_after(link.op, axis) or axis
    return tensor


def scaled_weights(layer: Layer, scale: Value) -> Tensor:
    """Return the weights of a layer, each channel of its result multiplied."""
    with creation.surroundings_of(layer.op):
        source = tf.cast(fold_arithmetic.unrounded(layer.kernel), scale.dtype)
        sizes = layer.sizes(layer.outputs) or ()
        spread = fold_arithmetic.along_axes(
            scale, layer.kernel.shape.rank, layer.outputs, sizes
        )
        return tf.cast(source * spread, layer.kernel.dtype, name=f"weights{SUFFIX}")


def rescaled(tensor: Tensor, ratio: Value, axis: int, place: Link) -> Tensor:
    """Return a tensor with each channel multiplied; see `build.add_bias`."""
    with creation.surroundings_of(place.op):
        ratio = tf.cast(ratio, tensor.dtype)
        if axis != -1 and ratio.shape.rank:
            ratio = tf.reshape(ratio, [-1] + [1] * (-1 - axis))
        return tf.multiply(tensor, ratio, name=f"rescale{SUFFIX}")


def _rest(fold: TrainingFold, moments: Moments) -> tuple[Tensor | None, ...]:
    rest: list[Tensor | None] = [None] * (len(fold.end.outputs) - 1)
    if moments.results is not None:
        rest[:2] = moments.results
    return tuple(rest)
