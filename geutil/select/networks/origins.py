"""Where tensors come from: parameters, statistics of a batch, or the data.

A layer and a batch norm are told from other ops by what they combine: data with
something that is the same for every example of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import tensorflow as tf

from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import ADDITIONS, ENTERS, SWITCHES
from geutil.graph.order import topological_sort
from geutil.graph.plain_gradients import is_stateful
from geutil.select.networks.constant_inputs import constant_inputs
from geutil.select.networks.norms import FUSED

_CONSTANTS = frozenset(("Const",))
_VARIABLES = frozenset(("ReadVariableOp", "Variable", "VariableV2"))
# They say something of the data's shape, or are what the caller feeds.
_NEVER = frozenset(
    (
        "Placeholder",
        "PlaceholderV2",
        "PlaceholderWithDefault",
        "Rank",
        "Shape",
        "ShapeN",
        "Size",
        "Merge",
        "Exit",
        "NextIteration",
    )
)
# How a branch or a loop of version 1 gets what does not change inside.
LED_IN = ENTERS | SWITCHES
_ROOTS = frozenset(("Rsqrt", "Sqrt", "Pow"))


class Origin(IntEnum):
    """What a tensor depends on at most, apart from constants."""

    CONSTANT = 0
    VARIABLE = 1
    BATCH = 2
    """Statistics of a batch: means over all of its axes but one."""


class Origins:
    """The origins of the tensors of a graph.

    Args:
        graph: the graph. It may grow afterwards; new ops count as data.

    Attributes:
        inputs: constants and variables that count as data, since nothing is fed.

    Cost: linear in ops and edges.
    """

    def __init__(self, graph: Graph) -> None:
        self.inputs: frozenset[Operation] = frozenset()
        ops = topological_sort(graph.get_operations())
        self._trace(ops)
        found = constant_inputs(ops, self.is_parameter)
        if found:
            self.inputs = found
            self._trace(ops)

    def _trace(self, ops: Sequence[Operation]) -> None:
        self._origins: dict[Operation, Origin] = {}
        self._spreads: dict[Operation, frozenset[Operation]] = {}
        for op in ops:
            origin = self._origin(op)
            if origin is not None:
                self._origins[op] = origin
                self._spreads[op] = self._behind(op)

    def of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a tensor; None for data."""
        op = tensor.op
        if op.type in FUSED and tensor.value_index in (1, 2):
            return Origin.BATCH if op.get_attr("is_training") else None
        return self._origins.get(op)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on constants and variables only."""
        return self.of(tensor) in (Origin.CONSTANT, Origin.VARIABLE)

    def spreads(self, tensor: Tensor) -> frozenset[Operation]:
        """Return the ops behind a parameter that take the root of a variance.

        That is, of a sum with a small constant, as in `rsqrt(variance + epsilon)`.
        """
        return self._spreads.get(tensor.op, frozenset())

    def _origin(self, op: Operation) -> Origin | None:
        kind = op.type
        if op in self.inputs:
            return None
        if kind in _CONSTANTS:
            return Origin.CONSTANT
        if kind in _VARIABLES:
            return Origin.VARIABLE
        if not op.inputs or not op.outputs or kind in _NEVER:
            return None
        if kind in LED_IN:
            varies = kind.endswith("Enter") and not op.get_attr("is_constant")
            return None if varies else self.of(op.inputs[0])
        found = Origin.CONSTANT
        for t in op.inputs:
            origin = self.of(t)
            if origin is None:
                # The mean of weights is a parameter, that of data a statistic.
                measures = kind == "Mean" and is_statistic(op)
                return Origin.BATCH if measures else None
            found = max(found, origin)
        return None if is_stateful(op) else found

    def _behind(self, op: Operation) -> frozenset[Operation]:
        behind = frozenset(
            root for t in op.inputs for root in self._spreads.get(t.op, ())
        )
        return behind | {op} if _is_spread(op) else behind


def _is_spread(op: Operation) -> bool:
    if op.type not in _ROOTS or op.inputs[0].op.type not in ADDITIONS:
        return False
    # A scalar is the scale of an attention, say.
    if op.outputs[0].shape.rank == 0:
        return False
    if op.type == "Pow" and tf.get_static_value(op.inputs[1]) not in (0.5, -0.5):
        return False
    return any(_is_small(t) for t in op.inputs[0].op.inputs)


def _is_small(tensor: Tensor) -> bool:
    value = scalar_value(tensor)
    return value is not None and 0 <= value < 1


def scalar_value(tensor: Tensor) -> float | None:
    """Return the value of a constant of one element, else None."""
    op = tensor.op
    while op.type in ("Identity", "Cast"):
        op = op.inputs[0].op
    if op.type != "Const":
        return None
    value = tf.make_ndarray(op.get_attr("value"))
    return float(value.reshape(())) if value.size == 1 else None


def is_statistic(op: Operation) -> bool:
    """Tell whether a Mean is taken over all axes of a batch but one."""
    rank = op.inputs[0].shape.rank
    axes = reduced_axes(op)
    return rank is not None and axes is not None and len(axes) == rank - 1 and 0 in axes


def reduced_axes(op: Operation) -> Sequence[int] | None:
    """Return the axes that a reduction reduces, counted from 0; None if not known."""
    rank = op.inputs[0].shape.rank
    axes = tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    return sorted({int(axis) % rank for axis in axes.reshape(-1)}) if rank else []
