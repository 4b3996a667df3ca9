"""Batch norms that normalize by the statistics of the batch: found, not yet turned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from geutil.graph.kinds import Operation, Tensor
from geutil.model.training.axes import (
    batch_mean,
    behind_shaping,
    is_fused_in_training,
    mean_of_difference,
)


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """A mean and a variance over the batch.

    Attributes:
        name: the fused op, or the op that yields the variance.
        mean: the mean, as the reduction yields it.
        variance: the variance, likewise.
        fused: the op that also normalizes, if there is one.
    """

    name: str
    mean: Tensor
    variance: Tensor
    fused: Operation | None = None


def batch_norms(
    ops: Iterable[Operation], fed: frozenset[Operation]
) -> Iterator[BatchNorm]:
    """Yield the batch norms in training mode among some ops, in their order.

    Layer, group and instance norms do not reduce over the batch; what is computed from
    variables alone, such as the statistics of a kernel, has no batch.

    Args:
        ops: the ops.
        fed: the ops that depend on an input.

    Cost: linear in the ops.
    """
    for op in ops:
        if op not in fed:
            continue
        if is_fused_in_training(op):
            yield BatchNorm(op.name, op.outputs[1], op.outputs[2], op)
        elif len(op.outputs) == 1:
            mean = _mean_below(op.outputs[0])
            if mean is not None:
                yield BatchNorm(op.name, mean, op.outputs[0])


def _mean_below(variance: Tensor) -> Tensor | None:
    """Return the batch mean that a batch variance is the variance around, or None."""
    by_difference = mean_of_difference(variance)
    if by_difference is not None:
        return by_difference[1]
    squares = batch_mean(variance)
    if squares is None:
        return None
    for a, b in _differences(squares):
        for candidate in (behind_shaping(b), behind_shaping(a)):
            if batch_mean(candidate) is not None:
                return candidate
    return None


def _differences(squares: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a, b) if a tensor holds (a - b)^2, perhaps weighted."""
    squares = _unmasked(squares)
    factors = [squares]
    if squares.op.type == "Mul":
        factors += [behind_shaping(t) for t in squares.op.inputs]
    for t in factors:
        if t.op.type == "SquaredDifference":
            yield t.op.inputs[0], t.op.inputs[1]
        elif t.op.type == "Square":
            difference = _unmasked(t.op.inputs[0])
            if difference.op.type == "Sub":
                yield difference.op.inputs[0], difference.op.inputs[1]


def _unmasked(tensor: Tensor) -> Tensor:
    """Return what a mask lets through of a tensor: Keras puts zeros for the rest."""
    tensor = behind_shaping(tensor)
    if tensor.op.type in ("Select", "SelectV2"):
        return behind_shaping(tensor.op.inputs[1])
    return tensor
