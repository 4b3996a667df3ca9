"""How long the ops of a step take, the functions that they run included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from geutil.errors import PlanError
from geutil.graph.types import Operation
from geutil.memory import op_costs, op_times
from geutil.memory.function_memory import Called
from geutil.memory.sizes import known_dims


def op_times_of(
    ops: Iterable[Operation],
    calls: Mapping[Operation, Called],
    *,
    measured: bool,
    in_seconds: bool = False,
) -> op_costs.Times:
    """Return how long ops take: as estimated, or in seconds, as far as can be measured.

    What cannot be measured takes as long as its estimate next to those of what can. An
    op that runs functions takes what they take, a loop all of its iterations.

    Args:
        ops: the ops.
        calls: what functions take that some of them run.
        measured: whether to run each kind of op.
        in_seconds: whether nothing but seconds will do.

    Raises:
        PlanError: they have to be seconds, and no op can be measured.

    Cost: with `measured`, that of running each kind of op.
    """
    ops = list(ops)

    def estimate(op: Operation) -> float:
        return calls[op].time if op in calls else op_costs.op_time(op)

    if not measured:
        return estimate
    seconds = op_times.op_times(ops, known_dims)
    if in_seconds and not any(seconds.values()):
        raise PlanError(
            "how long transfers take can be weighed against seconds only, and no op of "
            "this step can be measured: none is large, or TensorFlow does not run "
            "eagerly; plan without offload=True"
        )
    estimated = sum(estimate(op) for op in ops if op.name in seconds)
    scale = sum(seconds.values()) / estimated if estimated else 1.0

    def time_of(op: Operation) -> float:
        return seconds.get(op.name, scale * estimate(op))

    return time_of
