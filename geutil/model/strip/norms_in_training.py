"""Batch norms in training mode: found, with their reductions and moving averages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from geutil.graph.op_types import SELECTS
from geutil.graph.types import Graph, Operation, Tensor
from geutil.select.networks.provenance import FUSED, is_layer_norm
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


_ASSIGNMENTS = frozenset(
    ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
)
_ARITHMETIC = frozenset(("Add", "AddV2", "Mul", "Sub"))
_MAX_OPS = 64
"""Ops of an update that are looked at; those of real layers are some ten."""


@dataclass(frozen=True, eq=False)
class StatisticUpdate:
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


def moving_averages(graph: Graph) -> list[StatisticUpdate]:
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
    graph: Graph, live: frozenset[Operation], known: Iterable[StatisticUpdate]
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


def _moving_average(update: Operation) -> StatisticUpdate | None:
    handle, value = update.inputs[:2]
    parts = _parts(value, handle)
    if parts is None or len(parts.statistics) != 1 or parts.others:
        return None
    (statistic,) = parts.statistics
    if not parts.reads and not _averages_itself(statistic, handle):
        return None
    return StatisticUpdate(update, handle, statistic, next(iter(parts.reads), None))


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
