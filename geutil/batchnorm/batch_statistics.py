"""The statistics of batch norms in training, and moving averages to replace them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from geutil.batchnorm.norms import Norm, Obstacle
from geutil.graph import adjacency, creation, types
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import closure, walk
from geutil.reroute.tensors import add_control_inputs
from geutil.select.networks import batch_norms
from geutil.select.networks.batch_norms import MovingVariable, NoAverage
from geutil.select.networks.layers import Origin, Origins, is_statistic


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics that a norm in training normalizes by."""

    norm: Norm
    mean: Tensor  # the mean of the batch; of a fused op, its output
    # The variance of the batch: the variance that epsilon is added to; of a fused op,
    # its output, which is unbiased.
    variance: Tensor
    root: Operation  # the op that takes the root; of a fused op that op itself
    moving_variance: MovingVariable
    moving_mean: MovingVariable | None  # that of the mean; None if it was not asked for


def statistics_of(
    norm: Norm, origins: Origins, *, with_mean: bool
) -> Statistics | Obstacle:
    """Return the statistics of a norm in training, or the obstacle."""
    fused = norm.fused
    moments_and_root = (*fused.moments, fused.op) if fused else _of_steps(norm, origins)
    if isinstance(moments_and_root, Obstacle):
        return moments_and_root
    mean, variance, root = moments_and_root
    first, second = batch_norms.base_of(mean), batch_norms.base_of(variance)
    moving = batch_norms.moving_average(second, "variance", (), origins)
    if isinstance(moving, NoAverage):
        return Obstacle(moving.reason, moving.op)
    moving_mean = None
    if with_mean:
        # The variance may be made of the mean; its average is not the mean's.
        average = batch_norms.moving_average(first, "mean", {second.op}, origins)
        if isinstance(average, NoAverage):
            return Obstacle(average.reason, average.op)
        moving_mean = average
    return Statistics(norm, mean, variance, root, moving, moving_mean)


def _of_steps(
    norm: Norm, origins: Origins
) -> tuple[Tensor, Tensor, Operation] | Obstacle:
    """Return the mean, the variance and the op of its root in a norm of single ops."""
    operands = [step.operand for step in norm.steps if step.operand is not None]
    last = norm.steps[-1].op
    roots = dict.fromkeys(root for t in operands for root in origins.spreads(t))
    if len(roots) != 1:
        return Obstacle(f"takes the roots of {len(roots)} variances", last)
    root = next(iter(roots))
    variance = batch_norms.variance_below(root)
    if variance is None or origins.of(variance) is not Origin.BATCH:
        return Obstacle("does not take the root of the batch's variance", root)
    means = _means(operands, origins, batch_norms.base_of(variance).op, variance.op)
    if len(means) != 1:
        return Obstacle(
            f"shifts by {len(means)} means of the batch; it can be folded with one",
            last,
        )
    return means[0].outputs[0], variance, root


def _means(
    operands: list[Tensor], origins: Origins, *stops: Operation
) -> list[Operation]:
    """Return the means of the batch that operands are made of, the variance apart."""

    def is_mean(op: Operation) -> bool:
        return bool(op.outputs) and batch_norms.batch_mean(op.outputs[0]) is not None

    def behind(tensors: Iterable[Tensor]) -> list[Operation]:
        return [t.op for t in tensors if t.op not in stops]

    ops = walk(
        behind(operands), lambda op: () if is_mean(op) else behind(origins.sources(op))
    )
    return [op for op in ops if is_mean(op)]


_SAME_NUMBERS = batch_norms.SHAPING - {"StopGradient"} | {"Snapshot"}


def not_of_input(statistics: Statistics) -> Obstacle | None:
    """Return why statistics are not the plain ones of the norm's input, or None."""
    # Plain is the mean over all axes but the channels', and of the variance the mean of
    # squared differences from it, or the mean of squares without the square of the
    # mean.
    if statistics.norm.fused is not None:
        return None
    mean = statistics.mean.op
    variance = _plain(statistics.variance).op
    if mean.type != "Mean" or not _is_input(mean.inputs[0], statistics.norm):
        return Obstacle("is no mean of what the norm reads", mean)
    measured = _measured_around(variance, mean)
    if measured is None or not _is_input(measured, statistics.norm):
        return Obstacle("is no variance of what the norm reads", variance)
    return None


def _measured_around(variance: Operation, mean: Operation) -> Tensor | None:
    """Return the tensor whose variance around a mean `op` computes, or None."""
    # The variance in one pass: E[x^2] - E[x]^2.
    if variance.type == "Sub":
        squares, squared_mean = (_plain(t).op for t in variance.inputs)
        root = _squared(squared_mean)
        if squares.type != "Mean" or not is_statistic(squares):
            return None
        is_mean = root is not None and _mean_of(root) is mean
        return _squared(_plain(squares.inputs[0]).op) if is_mean else None
    if variance.type != "Mean" or not is_statistic(variance):
        return None
    squares = _plain(variance.inputs[0]).op
    difference = squares
    # Some layers write the square of a difference as two ops.
    if squares.type != "SquaredDifference":
        root = _squared(squares)
        difference = squares if root is None else _plain(root).op
        if difference.type != "Sub":
            return None
    data, around = difference.inputs
    return data if _mean_of(around) is mean else None


def _mean_of(tensor: Tensor) -> Operation:
    """Return the op that yields a mean, whatever its shape; gradients do not matter."""
    # Those of a variance do not depend on whether they go through its mean: the
    # differences from that add up to nothing.
    return batch_norms.base_of(tensor).op


def _squared(op: Operation) -> Tensor | None:
    """Return the tensor that an op squares; None if it does something else."""
    if op.type == "Square" or (op.type == "Mul" and op.inputs[0] is op.inputs[1]):
        return op.inputs[0]
    return None


def _is_input(tensor: Tensor, norm: Norm) -> bool:
    return _plain(tensor) is _plain(norm.input)


def _plain(tensor: Tensor) -> Tensor:
    return batch_norms.behind_shaping(tensor, _SAME_NUMBERS)


def read_moving(average: MovingVariable) -> Tensor:
    """Return the value that a variable has before it is updated."""
    # It has the shape of the statistic.
    statistic, variable = average.statistic, average.variable
    if variable.dtype == tf.resource:
        value = tf.raw_ops.ReadVariableOp(
            resource=variable, dtype=statistic.dtype, name="moving_fold"
        )
    else:
        value = tf.identity(variable, "moving_fold")
    for update in average.updates:
        add_control_inputs(update, value.op)
    shape = statistic.shape
    return tf.reshape(value, shape) if shape.is_fully_defined() else value


def with_moving(tensor: Tensor, reads: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return a parameter computed from moving statistics."""
    new = {id(old): replacement for old, replacement in reads}
    ops = closure(
        () if id(tensor) in new else [tensor.op],
        lambda op: [t.op for t in op.inputs if id(t) not in new],
    )
    for op in adjacency.topological_sort(ops):
        inputs = [new.get(id(t), t) for t in op.inputs]
        # An op above which no statistic is read needs no copy.
        if all(a is b for a, b in zip(inputs, op.inputs, strict=True)):
            continue
        node_def = op.node_def
        node_def.name = types.absolute_unique_name(op.graph, f"{op.name}_moving_fold")
        replacement = creation.make_op(op.graph, node_def, inputs)
        new.update(
            (id(a), b) for a, b in zip(op.outputs, replacement.outputs, strict=True)
        )
    return new.get(id(tensor), tensor)
