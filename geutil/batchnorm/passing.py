"""Ops between a layer and its batch norm that hand channels on as they are."""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.kinds import Operation

SAME = frozenset(
    (
        "CheckNumerics",
        "Identity",
        "PreventGradient",
        "Snapshot",
        "StopGradient",
    )
)
PASSING = SAME | {
    "BatchToSpaceND",
    "Cast",
    "ExpandDims",
    "Reshape",
    "Squeeze",
    "Transpose",
}


def axis_after(op: Operation, axis: int) -> int | None:
    """Return where the channels are behind an op, if it hands them on.

    Args:
        op: an op whose first input is the data.
        axis: the axis of the channels there, counted from the end.

    Returns:
        The axis of the channels in the op's output, counted from the end; None if the
        op does something else, or if that cannot be told from static shapes.
    """
    kind = op.type
    if kind in SAME:
        return axis
    if kind == "Cast":
        floating = op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating
        return axis if floating else None
    if kind == "BatchToSpaceND":
        return axis if axis == -1 else None
    if kind == "Squeeze":
        return _after_squeeze(op, axis)
    if kind == "ExpandDims":
        return _after_expansion(op, axis)
    if kind == "Reshape":
        return _after_reshape(op, axis)
    if kind == "Transpose":
        return _after_transpose(op, axis)
    return None


def _after_squeeze(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    gone = op.get_attr("squeeze_dims")
    if rank is None or not gone:
        return _after_reshape(op, axis)
    left = [i - rank for i in range(rank) if i not in {g % rank for g in gone}]
    return left.index(axis) - len(left) if axis in left else None


def _after_expansion(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    where = tf.get_static_value(op.inputs[1])
    if rank is None or where is None:
        return None
    added = int(where.reshape(())) % (rank + 1)
    place = axis + rank
    return axis if added <= place else axis - 1


def _after_reshape(op: Operation, axis: int) -> int | None:
    """What counts is that the channels and all that lies behind them stay."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before.rank is None or after.rank is None or after.rank < -axis:
        return None
    tail = before.as_list()[axis:]
    return axis if None not in tail and tail == after.as_list()[axis:] else None


def _after_transpose(op: Operation, axis: int) -> int | None:
    order = tf.get_static_value(op.inputs[1])
    if order is None:
        return None
    listed = [int(i) % len(order) for i in order]
    return listed.index(axis + len(listed)) - len(listed)
