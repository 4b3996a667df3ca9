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


@dataclass(frozen=True)
class SequenceCut:
    """A sequence cut into stages by their ends; `traffic` is in bytes."""

    ends: tuple[int, ...]
    costs: tuple[float, ...]
    traffic: float

    @property
    def largest(self) -> float:
        """The cost of the largest stage."""
        return max(self.costs)


def cut_sequence(
    crossing: Sequence[float], stages: int, row: Row, *, slack: float = 0.02
) -> SequenceCut:
    """Cut a sequence into stages: the largest is least, and then the traffic."""
    # By dynamic programming over all stretches, whose costs may fall as they grow:
    # stages times the square of the length, in numpy. `crossing` has the bytes that
    # cross each place from 0 to the length, both included; the largest stage may be
    # larger by the share `slack`, to save traffic.
    length = len(crossing) - 1
    if not 1 <= stages <= length:
        raise PlanError(
            f"{length} parts cannot be cut into {stages} stages; ask for 1 to {length}"
        )
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
    )


def lower_largest(
    ends: Sequence[int], cost: StageCost
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Move the ends of the largest stage inwards as long as that helps."""
    # No move of an end of the largest stage by a power of two, with ends behind it
    # moved along, then makes the largest less.
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
