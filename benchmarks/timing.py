"""Several sides of a comparison, measured in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

SLOW_SECONDS = 5.0
SHORT_SECONDS = 0.2


@dataclass(frozen=True)
class Side:
    """One side.

    Attributes:
        work: what is timed; takes what `prepare` returns.
        prepare: makes what the work uses up; not timed.
        check: looks at the result of the work; not timed.
    """

    work: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    check: Callable[[Any], None] = lambda result: None


def compare(sides: Sequence[Side]) -> list[float]:
    """Return the median of each side in seconds.

    The sides take turns, so each call finds the caches as a single call would, and
    whatever else the machine does falls on all of them. The first round only warms up,
    unless it is slow.
    """
    first = [once(side) for side in sides]
    if max(first) > SLOW_SECONDS:
        rounds, times = 2, [[seconds] for seconds in first]
    else:
        rounds, times = (7 if max(first) > SHORT_SECONDS else 15), [[] for _ in sides]
    order = list(range(len(sides)))
    for _ in range(rounds):
        # Nobody always goes first.
        order.reverse()
        for i in order:
            times[i].append(once(sides[i]))
    return [median(seconds) for seconds in times]


def once(side: Side) -> float:
    """Return how many seconds the work takes, with the garbage collector off."""
    prepared = side.prepare()
    gc.collect()
    gc.disable()
    try:
        start = perf_counter()
        # Held until the clock stops: taking the result apart is not the work.
        result = side.work(prepared)
        seconds = perf_counter() - start
    finally:
        gc.enable()
    side.check(result)
    return seconds
