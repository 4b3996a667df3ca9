"""Works with a baseline, and the rows that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.graphs import Case
from benchmarks.rows import Row
from benchmarks.timing import Side, compare

GROWTH_LIMIT = 12.0


@dataclass(frozen=True)
class Work:
    """Something that geutil does to a graph, and what it is held against.

    Attributes:
        name: the same for each graph.
        ours: what geutil does.
        baseline: the bare loop, or TensorFlow's own call.
        limit: the largest ratio.
        note: what it comes to on this graph.
        contrib: what the old graph editor takes, from the project's records.
    """

    name: str
    ours: Side
    baseline: Side
    limit: float
    note: str = ""
    contrib: str = ""


def rows(
    family: str, works_on: Callable[[Case], Sequence[Work]], cases: Sequence[Case]
) -> Iterator[Row]:
    """Measure a family on one graph, or on two in turn, the first the smaller.

    Two graphs also give the rows on growth.
    """
    for same_work in zip(*map(works_on, cases), strict=True):
        sides = [side for work in same_work for side in (work.ours, work.baseline)]
        times = [seconds * 1e3 for seconds in compare(sides)]
        for case, work, ours, baseline in zip(
            cases, same_work, times[::2], times[1::2], strict=True
        ):
            yield Row(
                family,
                work.name,
                case.name,
                ours,
                baseline,
                work.limit,
                note=work.note,
                contrib=work.contrib,
            )
        if len(cases) > 1:
            small, bare_small, large, bare_large = times
            yield Row(
                family,
                f"{same_work[0].name}, 10x the ops",
                f"{cases[1].name} to {cases[0].name}",
                large,
                small,
                GROWTH_LIMIT,
                note=f"baseline: {bare_large / bare_small:.1f}x",
                contrib="40x and more",
            )
