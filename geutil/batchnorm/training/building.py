"""Builds what stands in for a layer and its batch norm in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from geutil.batchnorm.arithmetic import Value, along_axes
from geutil.batchnorm.composing import computed
from geutil.batchnorm.folds import SUFFIX, Fold, add_bias, copy_op, filled
from geutil.batchnorm.links import Link
from geutil.batchnorm.passing import axis_after
from geutil.batchnorm.steps import Step
from geutil.batchnorm.training.corrections import Corrected, corrected
from geutil.batchnorm.training.operands import (
    Moments,
    as_it_is,
    beside,
    moments_of,
    scaling,
    with_statistics,
)
from geutil.batchnorm.training.statistics import Statistics
from geutil.batchnorm.values import unrounded
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.surroundings import surroundings_of


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingFold(Fold):
    """A batch norm in training, and the layer that takes it in.

    Attributes:
        statistics: what the norm normalizes by.
    """

    statistics: Statistics


@dataclass(frozen=True, eq=False)
class Built:
    """What was built for a fold.

    Attributes:
        result: what the folded layer makes, with its bias.
        rest: what replaces further outputs of the fold's end; None for those that stay.
        root: what has the root of the moving variance, and no longer reads it.
    """

    result: Tensor
    rest: tuple[Tensor | None, ...]
    root: Operation


Freeze = Callable[[], Tensor] | None
"""Returns whether the freeze has come; None if it never does."""


def build_training(
    fold: TrainingFold, freeze: Freeze, *, end_stays: bool = False
) -> Built:
    """Build the folded layer beside the old one, which goes on making statistics.

    Args:
        fold: the fold.
        freeze: whether the freeze has come.
        end_stays: let what is built end in the sum, as the fold does; else the sum is
            where the first one was, the layer's bias perhaps.
    """
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
        before = _steps_before(fold)
        needed = scaling(before) if frozen is None else before
        values = corrected(
            computed([*before, *batch.steps]),
            computed([*needed, *moving.steps]),
            batch.ratio_to(moving),
            frozen,
        )
    adding = (link for link in fold.links if link.step and link.step.adds)
    last = fold.links[-1]
    result = _layer(fold, values, last if end_stays else next(adding, last))
    return Built(result, _rest(fold, moments), moving.deviation.op)


def settle(fold: TrainingFold, built: Built, freeze: Freeze) -> None:
    """Stop the moving averages at the freeze, and let ref variables be read first.

    Raises:
        CycleError: what reads an average depends on its update.
    """
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
        with surroundings_of(update):
            kept = moving.value if moving.replaces else tf.zeros_like(value)
            chosen = tf.where(freeze(), kept, value, name=f"frozen{SUFFIX}")
        apply_edits(graph, [InputEdit(update, 1, chosen)])


def _steps_before(fold: TrainingFold) -> tuple[Step, ...]:
    """Return the steps between the layer and the norm, such as a bias."""
    inside = {step.op for step in fold.statistics.norm.steps}
    steps = (link.step for link in fold.links)
    return tuple(s for s in steps if s is not None and s.op not in inside)


def _layer(fold: TrainingFold, values: Corrected, place: Link) -> Tensor:
    layer, links = fold.layer, fold.links
    with surroundings_of(layer.op):
        scale = values.weights
        source = tf.cast(unrounded(layer.kernel), scale.dtype)
        sizes = layer.sizes(layer.outputs) or ()
        spread = along_axes(scale, layer.kernel.shape.rank, layer.outputs, sizes)
        weights = tf.cast(source * spread, layer.kernel.dtype, name=f"weights{SUFFIX}")
    tensor = copy_op(layer.op, {layer.weights: weights}).outputs[0]
    axis = layer.axis
    for link in links:
        if link is place:
            tensor = _rescaled(tensor, values.result, axis, link)
            tensor = add_bias(tensor, filled(values.bias, layer), axis, link)
        elif link.step is None:
            tensor = copy_op(link.op, {link.index: tensor}).outputs[0]
        if link.step is None:
            axis = axis_after(link.op, axis) or axis
    return tensor


def _rescaled(tensor: Tensor, ratio: Value, axis: int, place: Link) -> Tensor:
    with surroundings_of(place.op):
        ratio = tf.cast(ratio, tensor.dtype)
        if axis != -1 and ratio.shape.rank:
            ratio = tf.reshape(ratio, [-1] + [1] * (-1 - axis))
        return tf.multiply(tensor, ratio, name=f"rescale{SUFFIX}")


def _rest(fold: TrainingFold, moments: Moments) -> tuple[Tensor | None, ...]:
    rest: list[Tensor | None] = [None] * (len(fold.end.outputs) - 1)
    if moments.results is not None:
        rest[:2] = moments.results
    return tuple(rest)
