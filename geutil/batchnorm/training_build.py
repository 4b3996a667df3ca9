"""Layers folded for training: statistics of the batch, corrections, new ops.

A batch norm in training computes, with s(v) = sqrt(v + epsilon),

    y = gamma * (x - mean) / s(variance) + beta

with the statistics of the batch. Weights scaled by gamma / s(variance) would jump from
batch to batch, and with them their ranges when they are quantized. So the weights are
scaled by scale = gamma / s(moving variance), and the difference is corrected after the
layer (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2, figures 7 and 8). There:

    correction_scale  = s(variance) / s(moving variance)
    correction_offset = gamma * (mean / s(variance) - moving mean / s(moving variance))

"exact" computes the statistics from the layer as it was, which also runs. The result of
the folded one is divided by correction_scale, and the bias is beta - gamma * mean /
s(variance): the batch norm as it was. In the product of weights, gamma / s(variance)
and correction_scale s(variance) cancels; it is left out from the start, since it would
add rounding, and gradients that cancel too.

"one_pass" computes them from the folded layer's result z, divided by the scale:

    mean = mean(z) / scale    variance = variance(z) / scale^2
    y = z * (gamma / s(variance)) / scale + beta - gamma * mean / s(variance)

That is the batch norm of a layer with the weights quantized(weights * scale) / scale,
for any scale. So the scale carries no gradients: those of gamma go through the product
after the layer, where they are exact, and moving statistics have none.

From the freeze on, both are the batch norm as it will be deployed: nothing is divided
("one_pass": by 1, but for the gradients of gamma), and the bias is beta - gamma *
moving mean / s(moving variance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import tensorflow as tf

from geutil.batchnorm import build, norms
from geutil.batchnorm.batch_statistics import Statistics
from geutil.batchnorm.build import Fold, Value, copy_op
from geutil.batchnorm.fold_plan import ONE_PASS, Training
from geutil.batchnorm.norms import AffineKind, AffineStep, Link, axis_after
from geutil.graph import adjacency, creation, replicas
from geutil.graph.edits import (
    ControlEdit,
    InputEdit,
    Liveness,
    apply_edits,
    reader_edits,
)
from geutil.graph.resource_variables import STEP_NAME, step_counter
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.select.networks.batch_norms import FusedNorm, base_of
from geutil.select.networks.layers import Layer, data_format

_LEAST_GAMMA = 2.0**-10
"""Smaller gammas, with which blocks start that shall do nothing at first, leave nothing
to measure and to learn from: weights take this one, and the product behind the rest. A
power of 2 adds no rounding; above it a product in float32 keeps 13 of 23 bits."""

Pairs = tuple[tuple[Tensor, Tensor], ...]
Freeze = Callable[[], Tensor] | None
"""Returns whether the freeze has come; None if it never does."""


def freeze_of(graph: Graph, training: Training) -> Freeze:
    """Return the condition that moving averages have stopped."""
    delay = training.delay
    if delay is None:
        return None

    # One comparison for all folds, made when the first needs it: a graph without folds
    # gets no counter.
    @cache
    def frozen() -> Tensor:
        counter = step_counter(graph, training.step)
        scope = STEP_NAME + "_freeze"
        with creation.neutral(graph), replicas.device(), tf.name_scope(scope):
            limit = tf.constant(delay, tf.int64)
            return tf.greater_equal(counter.value, limit, name="frozen")

    return frozen


def _unbiased(variance: Value, count: Value) -> Value:
    """Return a variance with Bessel's correction: variance * count / (count - 1)."""
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


def _moments_of(
    statistics: Statistics,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the mean and variance of the batch, and the results of a fused op."""
    fused = statistics.norm.fused
    if fused is None:
        return statistics.mean, statistics.variance, ()
    # A fused op hands no gradients to its statistics, so they are computed beside it.
    op, data = fused.op, statistics.norm.input
    layout = data_format(op)
    axis, rank = layout.index("C"), len(layout)
    axes = [i for i in range(rank) if i != axis]
    with _beside(op):
        wide = tf.cast(data, statistics.mean.dtype)
        mean = tf.reduce_mean(wide, axes, name="batch_mean")
        shape = [-1] + [1] * (rank - 1 - axis)
        apart = tf.math.squared_difference(
            wide, tf.reshape(tf.stop_gradient(mean), shape)
        )
        variance = tf.reduce_mean(apart, axes, name="batch_variance")
        count = tf.size(data, tf.int64) // tf.size(mean, tf.int64)
        whole = _unbiased(variance, tf.cast(count, variance.dtype))
        return mean, variance, _averaged(fused, mean, whole)


def _averaged(norm: FusedNorm, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics that a fused op returns; no gradients go through them."""
    factor = norm.averaging_factor
    results = []
    for old_average, value in zip(norm.given, (mean, variance), strict=True):
        if factor != 1.0:
            value = old_average * (1.0 - factor) + value * factor
        results.append(tf.stop_gradient(value))
    return results[0], results[1]


def _with_statistics(
    statistics: Statistics, mean: Tensor | None, variance: Tensor
) -> BuiltNorm:
    """Build a norm with other statistics than those of the graph."""
    # `mean`: the mean to take, a vector of channels; None leaves out all steps that
    # only add.
    norm = statistics.norm
    steps = norm.steps if mean is not None else _scaling(norm.steps)
    with _beside(norm.result.op):
        if norm.fused is not None:
            return _fused(steps[0], mean, variance)
        replaced = {id(statistics.variance): _like(variance, statistics.variance)}
        if mean is not None:
            replaced[id(statistics.mean)] = _like(mean, statistics.mean)
    return _copied(statistics, steps, replaced)


def _with_moving(statistics: Statistics) -> BuiltNorm:
    """Build a norm with its moving statistics, at inference."""
    average = statistics.moving_mean
    mean = None if average is None else average.value
    return _with_statistics(statistics, mean, statistics.moving_variance.value)


def _scaling(steps: Sequence[AffineStep]) -> tuple[AffineStep, ...]:
    """Return the steps that do more than add."""
    adding = (AffineKind.ADD, AffineKind.SUBTRACT)
    return tuple(s for s in steps if s.kind not in adding)


@contextmanager
def _beside(op: Operation) -> Iterator[None]:
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
    with _beside(root):
        vector = build.as_vector(deviation)
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


def _like(value: Tensor, statistic: Tensor) -> Tensor:
    """Return a value of channels in the shape and type of a statistic."""
    return tf.reshape(tf.cast(value, statistic.dtype), statistic.shape)


@dataclass(frozen=True, eq=False)
class Built:
    """The ops built for a fold."""

    result: Tensor  # the result of the folded layer, with its bias
    # The replacements of further outputs of the fold's end; None for those that stay.
    rest: tuple[Tensor | None, ...]
    root: Operation  # that of the moving variance, which it no longer reads
    statistics: Pairs = ()  # statistics of the batch, and their replacements
    shapes: Pairs = ()  # tensors of the old layer, and new ones of the same shapes


def build_training(
    fold: Fold,
    freeze: Freeze,
    training: Training,
    *,
    end_stays: bool = False,
) -> Built:
    """Build the folded layer; see the top of this file."""
    # `end_stays`: end in the sum, as the fold does.
    function = _one_pass if training.statistics == ONE_PASS else _exact
    return function(fold, _of_batch(fold), freeze, end_stays)


def _of_batch(fold: Fold) -> Statistics:
    # The planner gives each fold of a norm in training some.
    return cast(Statistics, fold.statistics)


def _exact(
    fold: Fold, statistics: Statistics, freeze: Freeze, end_stays: bool
) -> Built:
    """Build the folded layer beside the old one, which still computes statistics."""
    mean, variance, results = _moments_of(statistics)
    batch = (
        _copied(statistics, statistics.norm.steps, {})
        if statistics.norm.fused is None
        else _with_statistics(statistics, mean, variance)
    )
    moving = _with_moving(statistics)
    frozen = None if freeze is None else freeze()
    before = _steps_before(fold, statistics)
    with _beside(fold.end):
        needed = _scaling(before) if frozen is None else before
        current = build.computed([*before, *batch.steps])
        deployed = build.computed([*needed, *moving.steps])
        # Not made of the two scales: gamma may be zero.
        factor, bias = batch.ratio_to(moving), current.offset
        if frozen is not None:
            factor = tf.where(frozen, tf.ones_like(factor), factor)
            bias = tf.where(frozen, deployed.offset, bias)
    adding = (link for link in fold.links if link.step and link.step.adds)
    # Else the sum is where the first one was, the layer's bias perhaps.
    last = fold.links[-1]
    place = last if end_stays else next(adding, last)
    tensor, axis, _ = _layer(fold, deployed.scale, place)
    result = _corrected(fold, tensor, axis, place, factor, bias)
    for link in fold.links[fold.links.index(place) + 1 :]:
        if link.step is None:
            result = copy_op(link.op, {link.index: result}).outputs[0]
    return Built(result, _rest(fold, results), moving.deviation.op)


def _one_pass(
    fold: Fold, statistics: Statistics, freeze: Freeze, end_stays: bool
) -> Built:
    """Build the folded layer, whose result yields the statistics of the batch."""
    norm = statistics.norm
    moving = _with_moving(statistics)
    frozen = None if freeze is None else freeze()
    before = _steps_before(fold, statistics)
    with _beside(fold.end):
        needed = _scaling(before) if frozen is None else before
        deployed = build.computed([*needed, *moving.steps])
        scale = _scale_for_weights(deployed.scale, moving)
    tensor, axis, shapes = _layer(fold, scale)
    with _beside(fold.end):
        added = build.computed(before)
        mean, variance, count = _measured(tensor, axis, scale, added)
    batch = _with_statistics(statistics, mean, variance)
    with _beside(fold.end):
        current = build.computed([*before, *batch.steps])
        factor, bias = current.scale, current.offset
        if frozen is not None:
            factor = tf.where(frozen, deployed.scale, factor)
        factor = factor / scale
        if frozen is not None:
            bias = tf.where(frozen, deployed.offset, bias)
    # Else the sum is where the norm begins.
    first = next(link for link in fold.links if link.op is norm.steps[0].op)
    place = fold.links[-1] if end_stays else first
    result = _corrected(fold, tensor, axis, place, factor, bias)
    with _beside(fold.end):
        results: tuple[Tensor, ...] = ()
        pairs: Pairs = ()
        if norm.fused is not None:
            whole = _unbiased(variance, tf.cast(count, variance.dtype))
            results = _averaged(norm.fused, mean, whole)
        else:
            pairs = tuple(
                (base, _like(new, base))
                for base, new in (
                    (base_of(statistics.mean), mean),
                    (base_of(statistics.variance), variance),
                )
            )
    return Built(result, _rest(fold, results), moving.deviation.op, pairs, shapes)


def _scale_for_weights(scale: Value, made: BuiltNorm) -> Value:
    """Return the scale of a norm without gradients, and never near zero."""
    least = 1.0 / made.deviation if made.inverted else made.deviation
    least = least * _LEAST_GAMMA
    return tf.stop_gradient(tf.where(tf.abs(scale) < least, least, scale))


def _measured(
    tensor: Tensor, axis: int, scale: Value, added: build.Affine
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and count of a norm's input, by a scaled layer."""
    # They end in a division by a tensor without gradients, by which stripping finds
    # them: see `geutil.select.networks.batch_norms.measured_moment`.
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
    return mean / scale, variance / square, count


def stay(fold: Fold, built: Built) -> None:
    """Let the end of a fold that can stay read the folded layer and its bias."""
    last, sum_op = fold.links[-1], built.result.op
    with creation.surroundings_of(last.op):
        # TensorFlow lets an op read another tensor only if that has the same shape.
        bias = tf.reshape(sum_op.inputs[1], last.op.inputs[1 - last.index].shape)
    inside = [step.op for step in fold.norms[0].steps[:-1]]
    build.let_stay(last, sum_op, bias, inside)


def settle(fold: Fold, built: Built, freeze: Freeze) -> None:
    """Settle the moving averages of a norm that was replaced."""
    graph, statistics = fold.end.graph, _of_batch(fold)
    _follow(graph, built)
    variance = statistics.moving_variance
    # Variables of references are to be read before they are updated.
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
            chosen = tf.where(
                freeze(), frozen_value, value, name=f"frozen{build.SUFFIX}"
            )
        apply_edits(graph, [InputEdit(update, 1, chosen)])


def _follow(graph: Graph, built: Built) -> None:
    """Let moving averages follow measured statistics, and retire the old layer."""
    if not built.shapes:
        return
    for old, new in built.shapes:
        norms.hand_over_shapes(old, new)
    edits = [edit for pair in built.statistics for edit in reader_edits(*pair)]
    if edits:
        apply_edits(graph, edits)
    # If somebody else reads the layer it goes on being computed.
    replaced = [old.op for old, _ in (*built.statistics, *built.shapes)]
    Liveness(graph).retire(replaced, lambda op: False)


def _steps_before(fold: Fold, statistics: Statistics) -> tuple[AffineStep, ...]:
    """Return the steps between the layer and the norm, such as a bias."""
    inside = {step.op for step in statistics.norm.steps}
    steps = (link.step for link in fold.links)
    return tuple(s for s in steps if s is not None and s.op not in inside)


def _layer(
    fold: Fold, scale: Value, stop: Link | None = None
) -> tuple[Tensor, int, Pairs]:
    """Copy a layer with scaled weights, and the moving ops behind it up to a link."""
    # Returns the result, the axis of its channels, and old tensors with new ones of the
    # same shapes. Steps of the path are in the weights and the bias by now.
    layer = fold.layer
    weights = _scaled_weights(layer, scale)
    tensor = copy_op(layer.op, {layer.weights: weights}).outputs[0]
    axis, shapes = layer.axis, [(layer.result, tensor)]
    for link in fold.links:
        if link is stop:
            break
        if link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
            axis = axis_after(link.op, axis) or axis
        if link is not fold.links[-1]:
            shapes.append((link.op.outputs[0], tensor))
    return tensor, axis, tuple(shapes)


def _corrected(
    fold: Fold, tensor: Tensor, axis: int, place: Link, factor: Value, bias: Value
) -> Tensor:
    """Return a layer's result, each channel multiplied, plus its bias."""
    tensor = _rescaled(tensor, factor, axis, place)
    return build.add_bias(tensor, build.filled(bias, fold.layer), axis, place)


def _scaled_weights(layer: Layer, scale: Value) -> Tensor:
    """Return the weights of a layer, each channel of its result multiplied."""
    with creation.surroundings_of(layer.op):
        source = tf.cast(build.unrounded(layer.kernel), scale.dtype)
        sizes = layer.sizes(layer.outputs) or ()
        spread = build.along_axes(scale, layer.kernel.shape.rank, layer.outputs, sizes)
        return tf.cast(
            source * spread, layer.kernel.dtype, name=f"weights{build.SUFFIX}"
        )


def _rescaled(tensor: Tensor, ratio: Value, axis: int, place: Link) -> Tensor:
    """Return a tensor with each channel multiplied; see `build.add_bias`."""
    with creation.surroundings_of(place.op):
        ratio = tf.cast(ratio, tensor.dtype)
        if axis != -1 and ratio.shape.rank:
            ratio = tf.reshape(ratio, [-1] + [1] * (-1 - axis))
        return tf.multiply(tensor, ratio, name=f"rescale{build.SUFFIX}")


def _rest(fold: Fold, results: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    rest: list[Tensor | None] = [None] * (len(fold.end.outputs) - 1)
    rest[: len(results)] = results
    return tuple(rest)
