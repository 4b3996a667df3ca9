"""Ops that scale, shift or forward channels, between a layer and its batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import tensorflow as tf

from geutil.graph.types import Operation, Tensor
from geutil.select.networks.batch_norms import fused_norm, is_layer_norm
from geutil.select.networks.layers import Origins, data_format

SAME = frozenset(
    ("CheckNumerics", "Identity", "PreventGradient", "Snapshot", "StopGradient")
)
_POOLS = frozenset(("AvgPool", "AvgPool3D"))
_RESIZES = frozenset(("ResizeBilinear", "ResizeNearestNeighbor"))
PASSING = (SAME | _POOLS | _RESIZES).union(
    ["BatchToSpaceND", "Cast", "ExpandDims", "Mean", "MirrorPad", "Reshape", "Squeeze"],
    ("StridedSlice", "Transpose"),
)
"""Types of ops that commute with a scale and a shift of each channel.

They move values, or average some of the same channel with weights whose sum is 1:
padding counts in no average of TensorFlow's.
"""


JOINS = frozenset(("Add", "AddN", "AddV2", "ConcatV2", "Pack"))
"""Types of ops that a scale and a shift may be moved in front of, to all inputs."""


def axis_after(op: Operation, axis: int, last: int | None = None) -> int | None:
    """Return where the channels are behind an op, if it hands them on."""
    # `last`: the size of the last axis of the output, where that is not in its static
    # shape.
    # Returns the axis of the channels in the op's output, counted from the end; None if
    # the op does something else, or if that is not known from static shapes.
    kind = op.type
    if kind in SAME:
        return axis
    if kind == "Cast":
        floating = op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating
        return axis if floating else None
    if kind == "BatchToSpaceND":
        return axis if axis == -1 and _is_spatial(op) else None
    if kind == "Squeeze":
        return _after_squeeze(op, axis)
    if kind == "ExpandDims":
        return _after_expansion(op, axis)
    if kind == "Reshape":
        keeps_last_axis = (
            axis == -1 and last is not None and op.inputs[0].shape[-1:] == [last]
        )
        return axis if keeps_last_axis else _after_reshape(op, axis)
    if kind == "Transpose":
        return _after_transpose(op, axis)
    if kind in _POOLS:
        return axis if op.get_attr("ksize")[axis] == 1 else None
    if kind in _RESIZES:
        return axis if axis == -1 else None
    if kind == "Mean":
        return _after_mean(op, axis)
    if kind == "MirrorPad":
        paddings = tf.get_static_value(op.inputs[1])
        return None if paddings is None or paddings[axis].any() else axis
    if kind == "StridedSlice":
        return _after_slice(op, axis)
    return _after_join(op, axis)


def _is_spatial(op: Operation) -> bool:
    """Return whether batches become positions along other axes than the last."""
    rank, block = op.inputs[0].shape.rank, op.inputs[1].shape
    return rank is not None and block.rank == 1 and (block[0] or rank) < rank - 1


def _after_squeeze(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    gone = op.get_attr("squeeze_dims")
    if rank is None or not gone:
        return _after_reshape(op, axis)
    left = [i - rank for i in range(rank) if i not in {g % rank for g in gone}]
    return left.index(axis) - len(left) if axis in left else None


def _after_mean(op: Operation, axis: int) -> int | None:
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    gone = {int(i) % rank for i in np.reshape(axes, -1)}
    if axis + rank in gone:
        return None
    if op.get_attr("keep_dims"):
        return axis
    return axis + sum(i > axis + rank for i in gone)


def _after_slice(op: Operation, axis: int) -> int | None:
    """Return the last axis if that is the channels' and a slice takes all of it."""
    rank, strides = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[3])
    if axis != -1 or rank is None or strides is None or not strides.size:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in _MASKS}
    added = bin(masks["new_axis"] & ~masks["ellipsis"]).count("1")
    last, named = 1 << strides.size - 1, strides.size - added
    # An ellipsis may be no axes at all.
    if masks["ellipsis"] & last:
        return -1 if named <= rank else None
    if not masks["ellipsis"] and named < rank:
        return -1
    whole = masks["begin"] & masks["end"] & last and strides[-1] == 1
    changed = (masks["new_axis"] | masks["shrink_axis"]) & last
    return -1 if whole and not changed else None


_MASKS = ("begin", "ellipsis", "end", "new_axis", "shrink_axis")


def _after_join(op: Operation, axis: int) -> int | None:
    if op.type == "Pack":
        rank = op.outputs[0].shape.rank
        if rank is None:
            return None
        return axis - (op.get_attr("axis") % rank - rank >= axis)
    return axis if op.type in JOINS else None


def joined_axis(op: Operation) -> int | None:
    """Return the axis along which a ConcatV2 joins, counted from the end, if known."""
    rank, axis = op.outputs[0].shape.rank, tf.get_static_value(op.inputs[-1])
    return None if rank is None or axis is None else int(axis) % rank - rank


def joined(op: Operation) -> tuple[Tensor, ...]:
    """Return the tensors of data that an op of `JOINS` joins."""
    return tuple(op.inputs[:-1] if op.type == "ConcatV2" else op.inputs)


def stacked_item(op: Operation) -> Tensor | None:
    """Return the tensor that a slice takes out of a stack, as it was before."""
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return None
    index, step = (tf.get_static_value(op.inputs[i]) for i in (1, 3))
    others = (op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis"))
    if index is None or step is None or index.size != 1 or any(others):
        return None
    place, before, orders = 0, op.inputs[0].op, []
    while before.type in ("Identity", "Transpose"):
        if before.type == "Transpose":
            order = tf.get_static_value(before.inputs[1])
            if order is None:
                return None
            orders.append(order % order.size)
            place = int(orders[-1][place])
        before = before.inputs[0].op
    rank = before.outputs[0].shape.rank if before.type == "Pack" else None
    if rank is None or before.get_attr("axis") % rank != place:
        return None
    left = np.arange(rank)
    for order in reversed(orders):
        left = left[order]
    # The other axes must come in the order in which they were stacked.
    if list(left[left != place]) != [i for i in range(rank) if i != place]:
        return None
    return before.inputs[int(index[0])]


def _after_expansion(op: Operation, axis: int) -> int | None:
    rank = op.inputs[0].shape.rank
    where = tf.get_static_value(op.inputs[1])
    if rank is None or where is None:
        return None
    added = int(where.reshape(())) % (rank + 1)
    place = axis + rank
    return axis if added <= place else axis - 1


def _after_reshape(op: Operation, axis: int) -> int | None:
    """The channels and all axes behind them have to stay."""
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


class AffineKind(Enum):
    """The effect of a step on x, with its operand v."""

    MULTIPLY = "x * v"
    DIVIDE = "x / v"
    ADD = "x + v"
    SUBTRACT = "x - v"
    SUBTRACT_FROM = "v - x"
    NORMALIZE = "a fused batch norm"


_KINDS = {
    ("Mul", 0): AffineKind.MULTIPLY,
    ("Mul", 1): AffineKind.MULTIPLY,
    ("RealDiv", 0): AffineKind.DIVIDE,
    ("Add", 0): AffineKind.ADD,
    ("Add", 1): AffineKind.ADD,
    ("AddV2", 0): AffineKind.ADD,
    ("AddV2", 1): AffineKind.ADD,
    ("BiasAdd", 0): AffineKind.ADD,
    ("BiasAddV1", 0): AffineKind.ADD,
    ("Sub", 0): AffineKind.SUBTRACT,
    ("Sub", 1): AffineKind.SUBTRACT_FROM,
}
_ADDITIONS = (AffineKind.ADD, AffineKind.SUBTRACT, AffineKind.SUBTRACT_FROM)


@dataclass(frozen=True, eq=False)
class AffineStep:
    """An op that treats all examples and positions alike, channel by channel."""

    op: Operation
    kind: AffineKind
    index: int  # which of its inputs is the data
    # The operand that it combines the data with; None for a fused batch norm, which
    # reads scale, offset, mean and variance behind the data.
    operand: Tensor | None
    # The axis of the channels, counted from the end (-1 is the last); None if the
    # operand is the same for all channels.
    axis: int | None

    @property
    def data(self) -> Tensor:
        """The tensor that is scaled or shifted."""
        return self.op.inputs[self.index]

    @property
    def result(self) -> Tensor:
        """The result."""
        return self.op.outputs[0]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The operands; of a fused norm scale, offset, mean and variance."""
        if self.operand is not None:
            return (self.operand,)
        return tuple(self.op.inputs[1:5])

    @property
    def adds(self) -> bool:
        """True if it adds something, and does not multiply."""
        return self.kind in _ADDITIONS


def step_of(op: Operation, origins: Origins) -> AffineStep | None:
    """Return an op as a step, or None."""
    # The other operand has to be a parameter, or made of statistics of the batch: a
    # residual of batch 1 has the shape of one, but depends on the data.
    fused = fused_norm(op)
    if fused is not None and not is_layer_norm(op):
        return AffineStep(op, AffineKind.NORMALIZE, 0, None, fused.axis)
    if (op.type, 0) not in _KINDS:
        return None
    for index, t in enumerate(op.inputs):
        kind = _KINDS.get((op.type, index))
        other = op.inputs[1 - index]
        if kind and origins.of(t) is None and origins.of(other) is not None:
            axis, fits_one_axis = _axis(op, other, t)
            return AffineStep(op, kind, index, other, axis) if fits_one_axis else None
    return None


def _axis(op: Operation, operand: Tensor, data: Tensor) -> tuple[int | None, bool]:
    """Return the axis that an operand goes along, and whether there is just one."""
    if op.type.startswith("BiasAdd"):
        if op.type == "BiasAdd" and data_format(op).startswith("NC"):
            rank = data.shape.rank
            return (None, False) if rank is None else (1 - rank, True)
        return -1, True
    shape = operand.shape
    # An operand of higher rank than the data would add axes to it.
    least = 1 if data.shape.rank is None else data.shape.rank
    if shape.rank is None or shape.rank > least:
        return None, False
    wide = [i - shape.rank for i, size in enumerate(shape.as_list()) if size != 1]
    if len(wide) > 1:
        return None, False
    if not wide:
        # One channel, or one value for all of them.
        return None, True
    return wide[0], True


@dataclass(frozen=True, eq=False)
class Link:
    """An op between a layer and the end of a batch norm, or the other way round."""

    op: Operation
    index: int  # which of its inputs is the data
    step: AffineStep | None  # the op as a step; None if it only hands channels on

    @property
    def data(self) -> Tensor:
        """The tensor of data that it reads."""
        return self.op.inputs[self.index]


def link_of(op: Operation, origins: Origins) -> Link | None:
    """Return an op that may stand between a layer and a norm as a link, or None."""
    # True if it forwards the channels is for `axis_after` to say.
    step = step_of(op, origins)
    if step is not None:
        return Link(op, step.index, step)
    if op.type in PASSING and op.inputs and origins.of(op.outputs[0]) is None:
        return Link(op, 0, None)
    return None


def as_links(steps: tuple[AffineStep, ...]) -> list[Link]:
    """Return steps as links."""
    return [Link(step.op, step.index, step) for step in steps]
