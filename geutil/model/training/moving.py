"""Moving averages: which variable an assignment makes the average of what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import SELECTS
from geutil.model.training.axes import SHAPING, is_batch_statistic
from geutil.transform.rewrite import Const

_ASSIGNMENTS = frozenset(
    ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
)
_ARITHMETIC = frozenset(("Add", "AddV2", "Mul", "Sub"))
_MAX_OPS = 64
"""Ops of an update that are looked at; those of real layers are some ten."""


@dataclass(frozen=True, eq=False)
class MovingAverage:
    """An assignment that moves a variable towards a statistic of the batch.

    Attributes:
        update: the assignment.
        handle: the variable's handle.
        statistic: the mean or variance over the batch.
        read: where the update reads the variable, None where it only writes it.
    """

    update: Operation
    handle: Tensor
    statistic: Tensor
    read: Tensor | None


def moving_averages(graph: Graph) -> list[MovingAverage]:
    """Return the moving averages of a graph, in the order of their updates.

    What is assigned must be made of the variable itself, one statistic of the batch
    and coefficients, by sums, differences, products and choices alone.

    Cost: linear in the ops.
    """
    found = []
    for op in graph.get_operations():
        if op.type in _ASSIGNMENTS:
            average = _moving_average(op)
            if average is not None:
                found.append(average)
    return found


def unknown_averages(
    graph: Graph, live: frozenset[Operation], known: Iterable[MovingAverage]
) -> Iterator[tuple[Operation, Tensor]]:
    """Yield (update, tensor) where a variable tracks what outputs are computed from.

    Nothing live reads the variable, as with the moving average of a batch norm in
    training; but the tensor is no statistic that is known.

    Args:
        graph: the graph.
        live: the ops that outputs are computed by.
        known: updates that are left out.

    Cost: linear in the ops and the readers of what is tracked.
    """
    left_out = frozenset(average.update for average in known)
    for op in graph.get_operations():
        if op.type not in _ASSIGNMENTS or op in left_out:
            continue
        handle, value = op.inputs[:2]
        if any(c in live for c in handle.consumers()):
            continue
        parts = _parts(value, handle)
        if parts is None or not parts.reads:
            continue
        for tensor in (*parts.statistics, *parts.others):
            if tensor.op in live and _is_scaled(value):
                yield op, tensor


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a value is a linear combination of, coefficients left out."""

    reads: list[Tensor]
    statistics: list[Tensor]
    others: list[Tensor]


def _parts(value: Tensor, handle: Tensor) -> _Parts | None:
    leaves = _leaves(value)
    if leaves is None:
        return None
    parts = _Parts([], [], [])
    for leaf in leaves:
        if is_batch_statistic(leaf):
            parts.statistics.append(leaf)
        elif leaf.op.type == "ReadVariableOp" and leaf.op.inputs[0] is handle:
            parts.reads.append(leaf)
        elif leaf.shape.rank != 0 and not Const().accepts(leaf):
            parts.others.append(leaf)
    return parts


def _is_scaled(value: Tensor) -> bool:
    """Tell whether a value is a product or a sum of products: sums only count up."""
    while value.op.type in SHAPING:
        value = value.op.inputs[0]
    return value.op.type == "Mul" or any(t.op.type == "Mul" for t in value.op.inputs)


def _moving_average(update: Operation) -> MovingAverage | None:
    handle, value = update.inputs[:2]
    parts = _parts(value, handle)
    if parts is None or len(parts.statistics) != 1 or parts.others:
        return None
    (statistic,) = parts.statistics
    if not parts.reads and not _averages_itself(statistic, handle):
        return None
    return MovingAverage(update, handle, statistic, next(iter(parts.reads), None))


def _averages_itself(statistic: Tensor, handle: Tensor) -> bool:
    """Tell whether a fused batch norm gives the new average, not the statistic."""
    op = statistic.op
    return any(
        t.op.type == "ReadVariableOp" and t.op.inputs[0] is handle
        for t in list(op.inputs)[3:5]
    )


def _leaves(value: Tensor) -> list[Tensor] | None:
    """Return what a value is a linear combination of; None if it is too much."""
    waiting, leaves = [value], []
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if len(seen) > _MAX_OPS:
            return None
        op = tensor.op
        if is_batch_statistic(tensor):
            leaves.append(tensor)
        elif op.type in SHAPING:
            waiting.append(op.inputs[0])
        elif op.type in _ARITHMETIC:
            waiting.extend(op.inputs)
        elif op.type in SELECTS:
            waiting.extend(list(op.inputs)[1:])
        else:
            leaves.append(tensor)
    return leaves
