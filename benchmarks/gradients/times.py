"""The time of a step, in several ways that take turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.gradients.cases import Setting
from benchmarks.gradients.repeating import rounds
from benchmarks.gradients.ways import WAYS, configure, traced
from benchmarks.networks import NETWORKS
from benchmarks.timing import Side, once


def measure_times(
    network: str, setting: Setting, ways: Sequence[str]
) -> dict[str, float]:
    """Return the median time of a step in each way, in seconds."""
    configure(setting)
    sides = [Side(_runner(network, setting, way)) for way in ways]
    for side in sides:
        once(side)  # Optimizes, or compiles.
    times = [[once(side)] for side in sides]
    order = list(range(len(sides)))
    for _ in range(rounds(sum(map(sum, times))) - 1):
        order.reverse()
        for i in order:
            times[i].append(once(sides[i]))
    return {way: median(seconds) for way, seconds in zip(ways, times, strict=True)}


def _runner(network: str, setting: Setting, way: str) -> Callable[[Any], Any]:
    chosen = WAYS[way]
    step = chosen.make(NETWORKS[network])
    function = traced(chosen, step, setting)
    batch = step.tensors()
    return lambda _: function(*batch)
