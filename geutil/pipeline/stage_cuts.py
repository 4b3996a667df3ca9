"""Cuts into stages of which the largest is least, and then the fewest bytes cross.

Arithmetic only: a sequence with the cost of each stretch. Nothing here knows
TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from geutil.errors import PlanError

StageCost = Callable[[int, int, int], float]
"""The cost of a stage, by its number and the stretch that it takes: start, end."""

_MOVED_ALONG = 2
"""How many ends behind one that moves are tried along with it."""
Row = Callable[[int, int], npt.NDArray[np.float64]]
"""The costs of a stage from a start on, by its number and the start."""

_SHARES = (0.0, 0.5, 1.0)
"""Parts of the slack that are tried: the first one that saves as many bytes is used."""


@dataclass(frozen=True)
class SequenceCut:
    """A sequence cut into stages by their ends; `traffic` is in bytes."""

    # No cut of this sequence has a largest stage below `least`, if the cost of a
    # stretch never falls as the stretch grows.

    ends: tuple[int, ...]
    costs: tuple[float, ...]
    traffic: float
    least: float

    @property
    def largest(self) -> float:
        """The cost of the largest stage."""
        return max(self.costs)


def cut_sequence(
    crossing: Sequence[float],
    stages: int,
    cost: StageCost,
    *,
    slack: float = 0.05,
    precision: float = 0.0,
) -> SequenceCut:
    """Cut a sequence into stages: the largest is least, and then the traffic.

    The least largest stage is bisected: within a limit, each stage takes all that it
    can, and the cheapest stretch that it cannot take is the next limit worth trying (A.
    Pinar and C. Aykanat, "Fast optimal load balancing algorithms for 1D partitioning",
    2004). Of all cuts whose largest stage is within the slack of that, dynamic
    programming finds the one of the fewest bytes.

    Args:
        crossing: the bytes that cross a cut at each place, from 0 to the length of the
            sequence, both included.
        stages: how many stages; one that takes nothing costs nothing.
        cost: the cost of a stage; it must not fall as the stretch grows.
        slack: the share by which the largest stage may be larger, to save traffic.
        precision: the share by which the largest stage may exceed the least, 0 for
            an exact cut.
    """
    length = _checked_length(crossing, stages)
    search = _CutSearch(length, stages, cost)
    least, most = search.bisect(precision)
    found = [search.cheapest(crossing, most * (1 + slack * s)) for s in _SHARES]
    fewest = min(traffic for traffic, _ in found)
    traffic, ends = next(f for f in found if f[0] <= fewest)
    costs = search.costs(ends)
    return SequenceCut(tuple(ends), tuple(costs), traffic, least)


def _checked_length(crossing: Sequence[float], stages: int) -> int:
    """Return how many parts there are; raise PlanError unless that is enough."""
    length = len(crossing) - 1
    if not 1 <= stages <= length:
        raise PlanError(
            f"{length} parts cannot be cut into {stages} stages; ask for 1 to {length}"
        )
    return length


def cut_any(
    crossing: Sequence[float], stages: int, row: Row, *, slack: float = 0.02
) -> SequenceCut:
    """Cut a sequence into stages, whether or not the cost of a stretch grows with it.

    By dynamic programming over all stretches. `row` returns the costs of the stretches
    of a stage from a start on, by their ends; the rest is as in `cut_sequence`. Cost:
    stages times the square of the length, in numpy.
    """
    length = _checked_length(crossing, stages)
    weight = np.array([*crossing[:-1], 0.0])
    least = np.full(length + 1, np.inf)
    least[0] = 0.0
    for stage in range(stages):
        best = np.full(length + 1, np.inf)
        for i in np.flatnonzero(np.isfinite(least[:-1])).tolist():
            costs = np.maximum(row(stage, i), least[i])
            best[i + 1 :] = np.minimum(best[i + 1 :], costs)
        least = best
    limit = float(least[-1]) * (1 + slack)
    traffic = np.full(length + 1, np.inf)
    traffic[0] = 0.0
    steps = []
    for stage in range(stages):
        best, came = np.full(length + 1, np.inf), np.zeros(length + 1, int)
        for i in np.flatnonzero(np.isfinite(traffic[:-1])).tolist():
            sums = np.where(
                row(stage, i) <= limit, traffic[i] + weight[i + 1 :], np.inf
            )
            # Of cuts with the same traffic, the earlier start.
            better = sums < best[i + 1 :]
            best[i + 1 :][better], came[i + 1 :][better] = sums[better], i
        steps.append(came)
        traffic = best
    ends = [length]
    for came in reversed(steps):
        ends.append(int(came[ends[-1]]))
    ends.reverse()
    stretches = enumerate(pairwise(ends))
    return SequenceCut(
        tuple(ends[1:]),
        tuple(float(row(s, i)[j - i - 1]) for s, (i, j) in stretches),
        float(traffic[-1]),
        float(least[-1]),
    )


def lower_largest(
    ends: Sequence[int], cost: StageCost
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Move the ends of the largest stage inwards as long as that helps.

    Returns the ends and costs of the stages. No move of an end of the largest stage by
    a power of two, with ends behind it moved along, makes the largest less.
    """
    cuts = [0, *ends]
    costs = [cost(s, i, j) for s, (i, j) in enumerate(pairwise(cuts))]
    while True:
        largest = max(range(len(costs)), key=costs.__getitem__)
        for tried in _moves(cuts, largest):
            new = [cost(s, i, j) for s, (i, j) in enumerate(pairwise(tried))]
            if max(new) < costs[largest]:
                cuts, costs = tried, new
                break
        else:
            return tuple(cuts[1:]), tuple(costs)


def _moves(cuts: Sequence[int], stage: int) -> Iterator[list[int]]:
    """Yield cuts with an end of a stage further in, and ends behind it moved along."""
    for place, way in ((stage, 1), (stage + 1, -1)):
        room = (cuts[stage + 1] - cuts[stage]).bit_length() - 1
        for step in (1 << k for k in range(room, -1, -1)):
            tried, at = list(cuts), place
            while 0 < at < len(cuts) - 1 and abs(at - place) <= _MOVED_ALONG:
                tried[at] += way * step
                if not all(i < j for i, j in pairwise(tried)):
                    break
                yield list(tried)
                at -= way


class _CutSearch:
    """The search for the cuts of one sequence."""

    def __init__(self, length: int, stages: int, cost: StageCost) -> None:
        self._length, self._stages = length, stages
        self._cost = cost
        self._known: dict[tuple[int, int, int], float] = {}

    def cost(self, stage: int, start: int, end: int) -> float:
        if start == end:
            return 0.0
        key = (stage, start, end)
        if key not in self._known:
            self._known[key] = self._cost(stage, start, end)
        return self._known[key]

    def costs(self, ends: Sequence[int]) -> list[float]:
        """Return the cost of each stage."""
        return [self.cost(s, i, j) for s, (i, j) in enumerate(pairwise((0, *ends)))]

    def bisect(self, precision: float) -> tuple[float, float]:
        """Return the least limit that some cut is within, from below and above."""
        even = [self._length * (s + 1) // self._stages for s in range(self._stages)]
        low, high = 0.0, max(self.costs(even))
        while low < high * (1 - precision):
            ends, refused = self.latest((low + high) / 2)
            if ends is None:
                low = refused
            else:
                high = max(self.costs(ends))
        return min(low, high), high

    def latest(self, limit: float) -> tuple[list[int] | None, float]:
        """Return the latest ends within a limit or None, and the least refused cost."""
        # Between the limit and that cost, every limit gives the same stages.
        ends, start, refused = [], 0, float("inf")
        for stage in range(self._stages):
            end = self._last(stage, start, limit)
            if end < self._length:
                refused = min(refused, self.cost(stage, start, end + 1))
            ends.append(end)
            start = end
        return (ends if start == self._length else None), refused

    def _last(self, stage: int, start: int, limit: float) -> int:
        """Return the last end within a limit; `start` if there is none."""
        fits, too_far, step = start, self._length + 1, 1
        while too_far - fits > 1:
            # Outward in growing steps: short stretches cost less to look at.
            middle = min(fits + step, self._length) if step else (fits + too_far) // 2
            if self.cost(stage, start, middle) <= limit:
                fits, step = middle, 2 * step
            else:
                too_far, step = middle, 0
        return fits

    def _first(self, stage: int, end: int, limit: float) -> int:
        """Return the first start within a limit."""
        fits, too_far = end, -1
        while fits - too_far > 1:
            middle = (fits + too_far) // 2
            if self.cost(stage, middle, end) <= limit:
                fits = middle
            else:
                too_far = middle
        return fits

    def cheapest(
        self, crossing: Sequence[float], limit: float
    ) -> tuple[float, list[int]]:
        """Return the least traffic of a cut within a limit, and its ends."""
        latest, _ = self.latest(limit)
        if latest is None:
            raise PlanError("the cost of a stage falls as the stage grows")
        earliest = [self._length] * self._stages
        for stage in range(self._stages - 1, 0, -1):
            earliest[stage - 1] = self._first(stage, earliest[stage], limit)
        reached: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        steps: list[dict[int, tuple[float, int]]] = []
        for stage, (low, high) in enumerate(zip(earliest, latest, strict=True)):
            starts = sorted(reached)
            first, new = 0, {}
            for end in range(low, high + 1):
                # As the end moves on, so does the first start within the limit.
                while (
                    first < len(starts)
                    and starts[first] <= end
                    and self.cost(stage, starts[first], end) > limit
                ):
                    first += 1
                usable = [i for i in starts[first:] if i <= end]
                if usable:
                    best = min(usable, key=lambda i: (reached[i][0], -i))
                    new[end] = (reached[best][0] + crossing[end], best)
            steps.append(new)
            reached = new
        ends, end = [], self._length
        for new in reversed(steps):
            ends.append(end)
            end = new[end][1]
        return reached[self._length][0], ends[::-1]
