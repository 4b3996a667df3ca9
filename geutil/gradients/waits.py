"""What each segment waits for before its ops run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from geutil.gradients.edges import backward_edges
from geutil.gradients.step import Step
from geutil.graph.kinds import Operation

_ANYWHERE = frozenset(("",))


def awaited_by_stage(
    step: Step,
    stages: Sequence[Sequence[Operation]],
    reading: Set[Operation],
    newest: Mapping[Operation, int],
) -> list[tuple[Operation, ...]]:
    """Return what each segment waits for.

    That is all that the backward pass does between the segment before it on the same
    device and itself: the backward ops that depend on that one, on none needed later,
    and that no other such op reads. Weight gradients are among them: the executor runs
    those late, and what they have not read yet cannot be freed. Where there is no such
    op (in a branch of version 1, which nothing outside can wait for), it is what the
    segment before waits for. No wait can close a cycle, since segments only wait for
    ops that depend on earlier ones.

    Args:
        step: the step.
        stages: the ops of each segment.
        reading: the backward ops that read what is recomputed.
        newest: the last segment that each backward op depends on, or -1.

    Cost: linear in the ops and their inputs.
    """
    devices = [_devices(ops) for ops in stages]
    joining = _joining(step, reading, newest, devices)
    sinks = _sinks(step, newest, joining)
    last: dict[str, int] = {}
    waits: list[tuple[Operation, ...]] = []
    for stage, places in enumerate(devices):
        # What is on no device in particular may be on any.
        near = last.keys() if places == _ANYWHERE else places | _ANYWHERE
        previous = sorted({last[place] for place in near if place in last})
        awaited = [op for i in previous for op in sinks.get(i, waits[i])]
        if not previous:
            # What the backward pass does before anything is needed again.
            awaited = [op for op in sinks.get(-1, ()) if _is_near(op, places)]
        waits.append(tuple(dict.fromkeys(awaited)) or step.seeds)
        last.update(dict.fromkeys(places, stage))
    return waits


def _devices(ops: Sequence[Operation]) -> frozenset[str]:
    """Return where a segment is. Helpers of gradient functions are on no device."""
    return frozenset(op.device for op in ops) - _ANYWHERE or _ANYWHERE


def _is_near(op: Operation, places: frozenset[str]) -> bool:
    return places == _ANYWHERE or op.device in places | _ANYWHERE


def _apart(first: frozenset[str], second: frozenset[str]) -> bool:
    return first.isdisjoint(second) and _ANYWHERE not in (first, second)


def _sinks(
    step: Step, newest: Mapping[Operation, int], joining: Set[Operation]
) -> dict[int, list[Operation]]:
    """Return the backward ops that nothing of their own stage reads, by stage."""
    edges = backward_edges(step)
    sinks: dict[int, list[Operation]] = {}
    for op in edges.awaitable:
        stage = newest[op]
        if op not in joining and all(
            newest[reader] != stage or reader in joining for reader in edges.readers[op]
        ):
            sinks.setdefault(stage, []).append(op)
    return sinks


def _joining(
    step: Step,
    reading: Set[Operation],
    newest: Mapping[Operation, int],
    devices: Sequence[frozenset[str]],
) -> set[Operation]:
    """Return the ops that only put together what segments on several devices yield.

    They add up the gradients of what two towers share, and go on from there. A tower
    that waited for that would wait for the other tower.
    """
    joining: set[Operation] = set()
    if len(frozenset(devices)) < 2:
        return joining
    for op, producers in backward_edges(step).producers.items():
        stage = newest[op]
        if op not in reading and any(
            producer in joining
            if newest[producer] == stage
            else newest[producer] >= 0
            and _apart(devices[newest[producer]], devices[stage])
            for producer in producers
        ):
            joining.add(op)
    return joining
