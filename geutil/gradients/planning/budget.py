"""Which cuts keep within a budget, and the least budget that any cuts keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geutil.gradients.planning.cuts import Ints, Stretches

_COST_WEIGHT = 0.01
"""Bytes of the whole that the compute of the whole is worth, to break ties."""


@dataclass(frozen=True)
class Cutting:
    """Cuts, and the most bytes that they are reckoned to need.

    Attributes:
        cuts: the numbers of the cuts, ascending; none for plain gradients.
        budget: the bytes.
    """

    cuts: tuple[int, ...]
    budget: int


def cut_within(stretches: Stretches, held: Ints, budget: int) -> Cutting | None:
    """Return the cuts that keep least among those that need no more than a budget.

    The bytes kept up to a cut are all that later stretches need to know of the cuts
    before, and fewer are never worse; so for each cut the best way to it is found from
    the ways to the cuts before it.

    Args:
        stretches: what lies between the cuts.
        held: `stretches.in_turn` or `stretches.at_worst`.
        budget: in bytes.

    Returns:
        The cuts, or None if there are none.

    Cost: quadratic in the number of cuts, in numpy.
    """
    count = len(stretches.places)
    never = np.inf
    kept = np.full(count, never)
    kept[0] = 0
    score = kept.copy()
    parent = np.zeros(count, np.int64)
    weight = _COST_WEIGHT * float(stretches.kept[0].max()) / _whole_cost(stretches)
    for j in range(1, count):
        needed = kept[:j] + held[:j, j]
        scores = score[:j] + stretches.kept[:j, j] + weight * stretches.cost[:j, j]
        scores[needed > budget] = never
        best = int(np.argmin(scores))
        if scores[best] < never:
            parent[j], score[j] = best, scores[best]
            kept[j] = kept[best] + stretches.kept[best, j]
    if score[-1] == never:
        return None
    cuts = []
    at = int(parent[-1])
    while at:
        cuts.append(at)
        at = int(parent[at])
    return Cutting(tuple(reversed(cuts)), budget)


def least_budget(stretches: Stretches, held: Ints, precision: float = 0.002) -> Cutting:
    """Return cuts whose budget is within `precision` of the least.

    Cost: that of `cut_within`, some ten to fifteen times.
    """
    high = int(held[0, -1])
    low = 0
    best = Cutting((), high)
    while high - low > precision * high:
        middle = (low + high) // 2
        found = cut_within(stretches, held, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _whole_cost(stretches: Stretches) -> float:
    return max(float(stretches.cost[0].max()), 1.0)
