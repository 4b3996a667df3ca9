"""Builds what a norm does to each channel, with one pair of statistics or another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import tensorflow as tf

from geutil.batchnorm.arithmetic import Value
from geutil.batchnorm.folds import copy_op
from geutil.batchnorm.steps import Kind, Step
from geutil.batchnorm.training.chains import averaging_factor
from geutil.batchnorm.training.corrections import unbiased
from geutil.batchnorm.training.statistics import Statistics
from geutil.batchnorm.values import as_vector
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.order import topological_sort
from geutil.graph.surroundings import surroundings_of
from geutil.select.networks.layers import data_format


@dataclass(frozen=True, eq=False)
class Made:
    """A norm with some statistics.

    Attributes:
        steps: what it does to the data.
        deviation: 1 / s of the variance, or s if `inverted`; a vector of channels.
        inverted: whether the graph divides by the root.
    """

    steps: tuple[Step, ...]
    deviation: Tensor
    inverted: bool

    def ratio_to(self, other: Made) -> Value:
        """Return s of the other's variance / s of this one's."""
        if self.inverted:
            return other.deviation / self.deviation
        return self.deviation / other.deviation


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of a batch, computed with gradients.

    A fused op hands no gradients to its statistics, so they are computed beside it.

    Attributes:
        mean: the mean.
        variance: the variance, biased.
        results: of a fused op, what it returns as statistics; else None.
    """

    mean: Tensor
    variance: Tensor
    results: tuple[Tensor, Tensor] | None = None


def moments_of(statistics: Statistics) -> Moments:
    """Return the statistics of the batch, built where a fused op has none."""
    if not statistics.fused:
        return Moments(statistics.mean, statistics.variance)
    step = statistics.norm.steps[0]
    op, data = step.op, step.data
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
        return Moments(mean, variance, _averaged(op, mean, whole))


def _averaged(op: Operation, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a fused op returns as statistics; no gradients go through them."""
    factor = averaging_factor(op)
    results = []
    for index, value in ((3, mean), (4, variance)):
        if factor != 1.0:
            value = op.inputs[index] * (1.0 - factor) + value * factor
        results.append(tf.stop_gradient(value))
    return results[0], results[1]


def with_statistics(
    statistics: Statistics, mean: Tensor | None, variance: Tensor
) -> Made:
    """Build a norm with other statistics than those of the graph.

    Args:
        statistics: of the norm.
        mean: the mean to take, a vector of channels; None leaves out all steps that
            only add.
        variance: likewise the biased variance.
    """
    norm = statistics.norm
    steps = norm.steps if mean is not None else scaling(norm.steps)
    with beside(norm.result.op):
        if statistics.fused:
            return _fused(steps[0], mean, variance)
        replaced = {id(statistics.variance): _like(variance, statistics.variance)}
        if mean is not None:
            replaced[id(statistics.mean)] = _like(mean, statistics.mean)
    return _copied(statistics, steps, replaced)


def as_it_is(statistics: Statistics, moments: Moments) -> Made:
    """Return a norm with the statistics of the batch."""
    if statistics.fused:
        return with_statistics(statistics, moments.mean, moments.variance)
    return _copied(statistics, statistics.norm.steps, {})


def scaling(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that do more than add."""
    return tuple(s for s in steps if s.kind not in (Kind.ADD, Kind.SUBTRACT))


@contextmanager
def beside(op: Operation) -> Iterator[None]:
    """Make the ops of the block in a scope of their own beside an op."""
    with surroundings_of(op), tf.name_scope("training_fold"):
        yield


def _fused(step: Step, mean: Tensor | None, variance: Tensor) -> Made:
    gamma, beta = step.op.inputs[1:3]
    root = tf.math.rsqrt(variance + float(step.op.get_attr("epsilon")))
    scale = root * gamma
    # No ops do these steps yet; those of the operands stand for them.
    steps = [Step(scale.op, Kind.MULTIPLY, 0, scale, step.axis)]
    if mean is not None:
        offset = beta - mean * scale
        steps.append(Step(offset.op, Kind.ADD, 0, offset, step.axis))
    return Made(tuple(steps), root, False)


def _copied(
    statistics: Statistics, steps: Sequence[Step], replaced: dict[int, Tensor]
) -> Made:
    """Copy what lies between the statistics and the steps."""
    root = statistics.root
    operands = [s.operand for s in steps if s.operand is not None]
    made = dict(replaced)
    ends = [*(t.op for t in operands), root] if replaced else []
    for op in _between(ends, (statistics.mean, statistics.variance)):
        inputs = {i: made[id(t)] for i, t in enumerate(op.inputs) if id(t) in made}
        if inputs:
            for old, new in zip(op.outputs, copy_op(op, inputs).outputs, strict=True):
                made[id(old)] = new
    deviation = made.get(id(root.outputs[0]), root.outputs[0])
    with beside(root):
        vector = as_vector(deviation)
    return Made(
        tuple(
            s
            if s.operand is None
            else replace(s, operand=made.get(id(s.operand), s.operand))
            for s in steps
        ),
        vector,
        not _is_inverse(root),
    )


def _between(ends: Sequence[Operation], starts: Sequence[Tensor]) -> list[Operation]:
    """Return the ops that compute something, without those of some tensors, in order.

    Cost: linear in the ops between.
    """
    stops = {id(t) for t in starts}
    found: dict[Operation, None] = {}
    queue = list(ends)
    while queue:
        op = queue.pop()
        if op in found:
            continue
        found[op] = None
        queue += [t.op for t in op.inputs if id(t) not in stops]
    return topological_sort(found)


def _is_inverse(root: Operation) -> bool:
    if root.type == "Pow":
        return bool(tf.get_static_value(root.inputs[1]) < 0)
    return root.type == "Rsqrt"


def _like(value: Tensor, wanted: Tensor) -> Tensor:
    """Return a value of channels in the shape and type of a statistic."""
    return tf.reshape(tf.cast(value, wanted.dtype), wanted.shape)
