"""Which cuts keep within a budget, and the least budget that any cuts keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geutil.gradients.planning.cuts import Ints, Stretches

Floats = npt.NDArray[np.float64]

_COST_SHARE = 0.01
"""The share of all bytes that the compute of all ops is worth, to break ties."""


@dataclass(frozen=True, eq=False)
class Terms:
    """How stretches and kept tensors are reckoned.

    Attributes:
        stretches: what lies between the cuts.
        held: the bytes for each stretch, `stretches.in_turn` or `stretches.at_worst`.
        idle: how much more a kept tensor counts that the backward pass does not read
            itself: what it does read would be held for a while anyway.
    """

    stretches: Stretches
    held: Ints
    idle: float = 0.0


def cut_within(terms: Terms, budget: int) -> tuple[int, ...] | None:
    """Return the cuts that keep least among those that need no more than a budget.

    The bytes kept up to a cut are all that later stretches need to know of the cuts
    before, and fewer are never worse; so for each cut the best way to it is found from
    the ways to the cuts before it. Of several, the one with less to compute is taken.

    Args:
        terms: what the stretches take.
        budget: in bytes.

    Returns:
        The numbers of the cuts, ascending, or None if there are none.

    Cost: quadratic in the number of cuts, in numpy.
    """
    added, score_added = _added(terms)
    count = len(added)
    kept = np.full(count, np.inf)
    kept[0] = 0
    score = kept.copy()
    parent = np.zeros(count, np.int64)
    for j in range(1, count):
        scores = score[:j] + score_added[:j, j]
        scores[kept[:j] + terms.held[:j, j] > budget] = np.inf
        best = int(np.argmin(scores))
        if np.isfinite(scores[best]):
            parent[j], score[j] = best, scores[best]
            kept[j] = kept[best] + added[best, j]
    if not np.isfinite(score[-1]):
        return None
    cuts = []
    at = int(parent[-1])
    while at:
        cuts.append(at)
        at = int(parent[at])
    return tuple(reversed(cuts))


def least_budget(terms: Terms, precision: float = 0.002) -> int:
    """Return a budget within `precision` of the least that some cuts keep.

    Cost: that of `cut_within`, some ten times.
    """
    high = int(terms.held[0, -1])
    low = 0
    while high - low > max(1, precision * high):
        middle = (low + high) // 2
        if cut_within(terms, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _added(terms: Terms) -> tuple[Floats, Floats]:
    """Return what each stretch adds to the bytes kept, and to the score."""
    stretches = terms.stretches
    added = stretches.kept + terms.idle * stretches.idle
    whole = float(stretches.cost[0].max())
    worth = _COST_SHARE * float(terms.held[0, -1]) / max(whole, 1.0)
    return added, added + worth * stretches.cost
