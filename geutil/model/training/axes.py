"""Reductions over the batch, and what passes a statistic on."""

from __future__ import annotations

import numpy as np

from geutil.graph.kinds import Operation, Tensor
from geutil.select.networks.norms import FUSED, is_layer_norm
from geutil.transform.rewrite import Const, constant_value

SHAPING = frozenset(
    ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")
)
"""Ops that pass the numbers of their first input on."""


def behind_shaping(tensor: Tensor) -> Tensor:
    """Return the tensor whose numbers another one holds in another shape or dtype."""
    while tensor.op.type in SHAPING:
        tensor = tensor.op.inputs[0]
    return tensor


def is_fused_in_training(op: Operation) -> bool:
    """Tell whether an op is a fused batch norm that uses the batch's statistics."""
    trains = op.type in FUSED and bool(op.get_attr("is_training"))
    return trains and not is_layer_norm(op)


def reduces_batch(op: Operation) -> bool:
    """Tell whether an op reduces over the first axis, but not over all axes."""
    if op.type not in ("Mean", "Sum") or not Const().accepts(op.inputs[1]):
        return False
    rank = op.inputs[0].shape.rank
    axes = np.atleast_1d(constant_value(op.inputs[1])).tolist()
    if rank is None:
        return 0 in axes
    axes = {axis % rank for axis in axes} if rank else set()
    return 0 in axes and len(axes) < rank


def batch_mean(tensor: Tensor) -> Tensor | None:
    """Return what a mean over the batch is the mean of, or None.

    The mean may be weighted, as Keras does it under a mask: a sum over a sum.
    """
    op = tensor.op
    if op.type == "Mean" and reduces_batch(op):
        return op.inputs[0]
    if op.type in ("RealDiv", "Div", "DivNoNan") and reduces_batch(op.inputs[0].op):
        total = op.inputs[0].op
        return total.inputs[0] if total.type == "Sum" else None
    return None


def is_batch_statistic(tensor: Tensor) -> bool:
    """Tell whether a tensor is a mean or variance over the batch."""
    op = tensor.op
    if is_fused_in_training(op):
        return tensor is op.outputs[1] or tensor is op.outputs[2]
    return batch_mean(tensor) is not None or mean_of_difference(tensor) is not None


def mean_of_difference(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (x, mean of x) if a tensor is E[x * x] - E[x] * E[x], or None."""
    op = tensor.op
    if op.type != "Sub":
        return None
    of_squares, squared_mean = (behind_shaping(t) for t in op.inputs)
    squares = batch_mean(of_squares)
    if squares is None or squares.op.type != "Square":
        return None
    if squared_mean.op.type != "Square":
        return None
    mean = behind_shaping(squared_mean.op.inputs[0])
    return (squares.op.inputs[0], mean) if batch_mean(mean) is not None else None
