"""Finds the statistics of the batch that a norm normalizes by."""

from __future__ import annotations

from dataclasses import dataclass

from geutil.batchnorm.norms import Norm
from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.steps import Kind
from geutil.batchnorm.training.chains import base_of
from geutil.batchnorm.training.moving import Moving, moving_average
from geutil.graph.kinds import Operation, Tensor
from geutil.select.networks.origins import Origin, Origins, is_statistic


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a norm in training normalizes by.

    Attributes:
        norm: the norm.
        mean: the mean of the batch; of a fused op, its output.
        variance: the variance of the batch: what epsilon is added to; of a fused op,
            its output, which is unbiased.
        root: the op that takes the root; of a fused op that op itself.
        moving_variance: the moving average of the variance.
        moving_mean: that of the mean; None if it was not asked for.
    """

    norm: Norm
    mean: Tensor
    variance: Tensor
    root: Operation
    moving_variance: Moving
    moving_mean: Moving | None

    @property
    def fused(self) -> bool:
        """Whether the norm is one op."""
        return self.norm.steps[0].kind is Kind.NORMALIZE


def statistics_of(
    norm: Norm, origins: Origins, *, with_mean: bool
) -> Statistics | Obstacle:
    """Return the statistics of a norm in training, or what cannot be found.

    Args:
        norm: the norm.
        origins: of the graph's tensors.
        with_mean: whether the moving mean is needed.

    Cost: linear in the ops that compute and read the statistics.
    """
    found = _of_fused(norm) if _is_fused(norm) else _of_steps(norm, origins)
    if isinstance(found, Obstacle):
        return found
    mean, variance, root = found
    first, second = base_of(mean), base_of(variance)
    moving = moving_average(second, "variance", (), origins)
    if isinstance(moving, Obstacle):
        return moving
    moving_mean = None
    if with_mean:
        # The variance may be made of the mean; its average is not the mean's.
        average = moving_average(first, "mean", {second.op}, origins)
        if isinstance(average, Obstacle):
            return average
        moving_mean = average
    return Statistics(norm, mean, variance, root, moving, moving_mean)


def is_correction(norm: Norm, origins: Origins) -> bool:
    """Tell whether what looks like a norm is what a fold for training left.

    Behind a layer it multiplies by a quotient of two roots, of a moving variance and of
    the batch's; a norm takes only one.
    """
    for step in norm.steps:
        if step.operand is None:
            continue
        kinds = {
            origins.of(root.outputs[0]) is Origin.BATCH
            for root in origins.spreads(step.operand)
        }
        if len(kinds) > 1:
            return True
    return False


def _is_fused(norm: Norm) -> bool:
    return norm.steps[0].kind is Kind.NORMALIZE


def _of_fused(norm: Norm) -> tuple[Tensor, Tensor, Operation]:
    op = norm.steps[0].op
    return op.outputs[1], op.outputs[2], op


def _of_steps(
    norm: Norm, origins: Origins
) -> tuple[Tensor, Tensor, Operation] | Obstacle:
    operands = [step.operand for step in norm.steps if step.operand is not None]
    last = norm.steps[-1].op
    roots = dict.fromkeys(root for t in operands for root in origins.spreads(t))
    if len(roots) != 1:
        return Obstacle(f"takes the roots of {len(roots)} variances", last)
    root = next(iter(roots))
    batch = [t for t in root.inputs[0].op.inputs if origins.of(t) is Origin.BATCH]
    if len(batch) != 1:
        return Obstacle("does not take the root of the batch's variance", root)
    variance = batch[0]
    means = _means(operands, base_of(variance).op, variance.op)
    if len(means) != 1:
        return Obstacle(
            f"shifts by {len(means)} means of the batch; it can be folded with one",
            last,
        )
    return means[0].outputs[0], variance, root


def _means(operands: list[Tensor], *stops: Operation) -> list[Operation]:
    """Return the means of the batch that operands are made of, the variance apart."""
    found: dict[Operation, None] = {}
    seen: set[Operation] = set(stops)
    queue = [t.op for t in operands]
    while queue:
        op = queue.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "Mean" and is_statistic(op):
            found[op] = None
        else:
            queue += [t.op for t in op.inputs]
    return list(found)
