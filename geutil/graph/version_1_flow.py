"""Loops and conditionals of version 1, seen from outside.

The executor kills the ops of a branch that is not taken and all that wait for them. The
gradient of a conditional is made of such ops too, but nothing marks these except the
Switch ops behind them and the Merge ops ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from geutil.graph.adjacency import is_back_edge, predecessors
from geutil.graph.kinds import Operation
from geutil.graph.plain_gradients import in_version_1_control_flow

_DEEPER = {"Switch": 1, "RefSwitch": 1, "Merge": -1, "RefMerge": -1}


def unconditional(ops: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the ops that run once whenever their graph is run, and can be awaited.

    Args:
        ops: ops in topological order, with all that lies between two of them.

    Cost: linear in the ops and their inputs.
    """
    depth: dict[Operation, int] = {}
    for op in ops:
        outside = not in_version_1_control_flow(op)
        behind = max((depth[p] for p in predecessors(op) if p in depth), default=0)
        # Within a loop, Switch and Merge make up the loop.
        depth[op] = behind + (_DEEPER.get(op.type, 0) if outside else 0)
        if outside and not depth[op]:
            yield op


def back_edges_among(ops: Iterable[Operation]) -> list[tuple[Operation, Operation]]:
    """Return the back edges of loops among ops: (producer, consumer)."""
    members = frozenset(ops)
    return [
        (t.op, op)
        for op in ops
        for t in op.inputs
        if t.op in members and is_back_edge(t.op, op)
    ]
