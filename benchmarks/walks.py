"""Walks over everything, against bare loops over the same edges."""

from __future__ import annotations

import geutil as ge
from benchmarks.graphs import Case
from benchmarks.timing import Side
from benchmarks.works import Work

LIMIT = 4.0


def works(case: Case) -> list[Work]:
    ops = case.ops

    def visits_everything(walk: list[object]) -> None:
        assert len(walk) == len(ops), f"visited {len(walk)} of {len(ops)} ops"

    def read_inputs(_: None) -> None:
        for op in ops:
            for t in op.inputs:
                t.op  # noqa: B018 (the read is what is timed)

    def ask_consumers(_: None) -> None:
        for op in ops:
            for t in op.outputs:
                t.consumers()

    sinks, sources = case.sinks(), case.sources()
    return [
        Work(
            "backward walk over everything",
            Side(lambda _: ge.get_backward_walk_ops(sinks), check=visits_everything),
            Side(read_inputs),
            LIMIT,
            contrib="670 us/op at 50,000 ops, quadratic",
        ),
        Work(
            "forward walk over everything",
            Side(lambda _: ge.get_forward_walk_ops(sources), check=visits_everything),
            Side(ask_consumers),
            LIMIT,
            contrib="900 us/op at 50,000 ops, quadratic",
        ),
    ]
