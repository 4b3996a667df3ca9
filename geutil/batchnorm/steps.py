"""Steps that scale and shift channels, one op each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from geutil.graph.kinds import Operation, Tensor
from geutil.select.networks.layers import data_format
from geutil.select.networks.norms import FUSED, is_layer_norm
from geutil.select.networks.origins import Origins

_AXES = {"NHWC": -1, "NDHWC": -1, "NCHW": -3, "NCDHW": -4}


class Kind(Enum):
    """What a step does to x, with its operand v."""

    MULTIPLY = "x * v"
    DIVIDE = "x / v"
    ADD = "x + v"
    SUBTRACT = "x - v"
    SUBTRACT_FROM = "v - x"
    NORMALIZE = "a fused batch norm"


_KINDS = {
    ("Mul", 0): Kind.MULTIPLY,
    ("Mul", 1): Kind.MULTIPLY,
    ("RealDiv", 0): Kind.DIVIDE,
    ("Add", 0): Kind.ADD,
    ("Add", 1): Kind.ADD,
    ("AddV2", 0): Kind.ADD,
    ("AddV2", 1): Kind.ADD,
    ("BiasAdd", 0): Kind.ADD,
    ("BiasAddV1", 0): Kind.ADD,
    ("Sub", 0): Kind.SUBTRACT,
    ("Sub", 1): Kind.SUBTRACT_FROM,
}
_ADDITIONS = (Kind.ADD, Kind.SUBTRACT, Kind.SUBTRACT_FROM)


@dataclass(frozen=True, eq=False)
class Step:
    """An op that treats all examples and positions alike, channel by channel.

    Attributes:
        op: the op.
        kind: what it does.
        index: which of its inputs is the data.
        operand: what it combines the data with; None for a fused batch norm, which
            reads scale, offset, mean and variance behind the data.
        axis: the axis of the channels, counted from the end (-1 is the last); None if
            the operand is the same for all channels.
    """

    op: Operation
    kind: Kind
    index: int
    operand: Tensor | None
    axis: int | None

    @property
    def data(self) -> Tensor:
        """What is scaled or shifted."""
        return self.op.inputs[self.index]

    @property
    def result(self) -> Tensor:
        """What it is scaled or shifted to."""
        return self.op.outputs[0]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What it combines the data with: of a fused norm scale to variance."""
        if self.operand is not None:
            return (self.operand,)
        return tuple(self.op.inputs[1:5])

    @property
    def adds(self) -> bool:
        """Whether it adds something, and does not multiply."""
        return self.kind in _ADDITIONS


def step_of(op: Operation, origins: Origins) -> Step | None:
    """Return an op as a step, or None.

    The other operand has to be a parameter, or made of statistics of the batch: a
    residual of batch 1 has the shape of one, but depends on the data.
    """
    if op.type in FUSED and not is_layer_norm(op):
        return Step(op, Kind.NORMALIZE, 0, None, _AXES[data_format(op)])
    if (op.type, 0) not in _KINDS:
        return None
    for index, t in enumerate(op.inputs):
        kind = _KINDS.get((op.type, index))
        other = op.inputs[1 - index]
        if kind and origins.of(t) is None and origins.of(other) is not None:
            axis, known = _axis(op, other, t)
            return Step(op, kind, index, other, axis) if known else None
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
