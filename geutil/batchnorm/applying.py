"""Lets a graph read what folds built, all at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.plain_gradients import is_stateful
from geutil.reroute.plan import Plan
from geutil.reroute.tensors import redirection
from geutil.transform.rewrite.liveness import Liveness


def put_in_place(
    graph: Graph,
    results: Mapping[Operation, Tensor],
    made: Sequence[Operation],
    kept: Collection[int],
) -> None:
    """Let whoever reads the first output of some ops read other tensors instead.

    The old ops are left as they are, down to what they read, and retired: later folds
    and rewrites pass them over. Ops that waited for an old op wait for what replaces
    it.

    Args:
        graph: the graph.
        results: what replaces the first output of each op.
        made: the ops that were made for that.
        kept: the ids of tensors that are read from outside, and stay.

    Raises:
        CycleError, StaleGraphError, FinalizedGraphError: see `Plan.apply`.

    Cost: linear in the ops and edges that it concerns; see `Plan.apply` for the check.
    """
    liveness = Liveness(graph)
    liveness.take_in(made)
    dead = _dead(results, liveness, kept)
    plan = Plan(graph)
    olds, news = [op.outputs[0] for op in results], list(results.values())
    plan.redirect(redirection(olds, news, lambda op: op not in dead))
    for old, new in results.items():
        for op in liveness.waiting(old):
            if op not in dead:
                awaited = (new.op if c is old else c for c in plan.control_inputs(op))
                plan.set_control_inputs(op, dict.fromkeys(awaited))
    plan.apply()
    liveness.forget(results)
    liveness.retire(results, lambda op: any(id(t) in kept for t in op.outputs))


def _dead(
    results: Mapping[Operation, Tensor], liveness: Liveness, kept: Collection[int]
) -> set[Operation]:
    """Return the ops that nobody will need once the results have been replaced."""
    dead: set[Operation] = set()
    waiting = list(results)
    while waiting:
        op = waiting.pop()
        if op in dead or any(id(t) in kept for t in op.outputs):
            continue
        if op not in results and (is_stateful(op) or not liveness.readers(op) <= dead):
            continue
        dead.add(op)
        waiting.extend(t.op for t in op.inputs)
    return dead
