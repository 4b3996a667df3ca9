"""A view of everything, against reading all inputs and consumers."""

from __future__ import annotations

import geutil as ge
from benchmarks.graphs import Case
from benchmarks.timing import Side
from benchmarks.works import Work

LIMIT = 5.0


def works(case: Case) -> list[Work]:
    ops, graph = case.ops, case.graph

    def read_everything(_: None) -> None:
        for op in ops:
            for t in op.inputs:
                t.op  # noqa: B018 (the read is what is timed)
            for t in op.outputs:
                t.consumers()

    def holds_everything(view: ge.SubGraphView) -> None:
        assert len(view.ops) == len(ops)

    return [
        Work(
            "make_view of everything",
            Side(lambda _: ge.make_view(graph), check=holds_everything),
            Side(read_everything),
            LIMIT,
            contrib="8 us/op and growing",
        )
    ]
