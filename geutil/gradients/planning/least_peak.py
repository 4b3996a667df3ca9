"""The least predicted peak.

The choice of kept tensors, within a budget or as low as it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from geutil.gradients.planning.cuts import (
    ForwardPass,
    Ints,
    Stretches,
    measure_stretches,
    read_forward,
)
from geutil.gradients.planning.local_search import CuttingSearch, Trial, Trials
from geutil.gradients.segments import Keeps
from geutil.gradients.step import PlainStep
from geutil.graph import runtime
from geutil.graph.types import Tensor

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
    kept_bytes = np.full(count, np.inf)
    kept_bytes[0] = 0
    score = kept_bytes.copy()
    parent = np.zeros(count, np.int64)
    for j in range(1, count):
        scores = score[:j] + score_added[:j, j]
        scores[kept_bytes[:j] + terms.held[:j, j] > budget] = np.inf
        best = int(np.argmin(scores))
        if np.isfinite(scores[best]):
            parent[j], score[j] = best, scores[best]
            kept_bytes[j] = kept_bytes[best] + added[best, j]
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


_SLACKS = (1.0, 1.02, 1.05, 1.1)
"""What budgets are tried, in parts of the least: the reckoning is not exact."""
_IDLE = (0.0, 0.1)
_TRIED_NODES = 80_000
_FEWEST_TRIALS = 12
_MOST_TRIALS = 60
"""Choices are tried out until so many nodes were simulated, within these bounds."""
_QUICK_NODES = 12_000
"""Small graphs have more trials, for so many nodes: that takes some 0.2 s."""
_FEWEST_FULL, _FULL = 2, 3
"""In so many trials, in small graphs one of so many, the last segment is recomputed."""
_LARGE = 1000
"""Steps of more nodes are tried out without their tiny tensors."""
_WORTH_WHILE = 0.98
"""Nothing is run again unless the peak falls to this part of that by order alone."""


def choose_for_memory(
    step: PlainStep,
    always: Keeps,
    min_checkpoint_size: int = 0,
    *,
    among_others: bool = False,
    others: Iterable[Sequence[Tensor]] = (),
    trials: Trials | None = None,
) -> Trial:
    """Return the tensors to keep for the least predicted peak.

    No op runs more than once again. The forward pass is cut into stretches such that
    the fullest of them is as small as can be: those near the loss are shorter, since
    most of what is kept is still held when the backward pass is there. Several cuttings
    are then simulated, and the best is taken, unless plain gradients are.

    Args:
        step: the step with plain gradients.
        always: tells which tensors are kept whatever is chosen.
        min_checkpoint_size: no tensor of fewer elements is chosen, but tiny ones that
            reach far.
        among_others: whether the step is one of several whose kept tensors are held
            together.
        others: choices that are tried besides.
        trials: what tries choices out; None for new ones.

    Returns:
        The choice; without tensors and with a reason if plain gradients are best.

    Cost: linear in the ops of the step and their edges.
    """
    forward = read_forward(step, always, min_checkpoint_size)
    trials = trials or Trials(step, always)
    return _choose(step, forward, trials, others, among_others=among_others)


def _choose(
    step: PlainStep,
    forward: ForwardPass,
    trials: Trials,
    others: Iterable[Sequence[Tensor]],
    *,
    among_others: bool,
) -> Trial:
    """Return the best tensors to keep; none if the peak would fall too little."""
    alone = trials.without()
    # The order is the executor's where none is better.
    alone = replace(alone, peak=min(trials.program.plain_peak(), alone.peak))
    if not forward.buffers:
        reason = "the backward pass reads nothing that could be recomputed"
        return replace(alone, reason=reason)
    gradient_bytes = trials.program.gradient_bytes(step.backward)
    stretches = measure_stretches(forward, gradient_bytes)
    places = stretches.places[1:-1].tolist()
    most = _most_trials(trials.program.size)
    full = most // _FULL if most > _MOST_TRIALS else _FEWEST_FULL
    # XLA's own order holds more where the last segment runs again at once.
    full = 0 if runtime.is_compiled_by_xla(step.graph) else full
    is_large = trials.program.size > _LARGE
    tried = trials.compact() if is_large else trials
    # The best one of a large step is tried once more, whole.
    left = most - full - is_large
    search = CuttingSearch(forward, tried, places, left, among_others=among_others)
    for other in others:
        search.add(other)
    search.start(_cuttings(stretches))
    # A sweep finds what steps of one cut do not lead to; its best is then refined.
    search.descend()
    search.sweep()
    search.descend()
    search.recompute_last(full)
    best = search.best()
    if best and is_large:
        exact = trials.run(best.kept, spare_last=best.spares_last)
        best = replace(exact, spares_last=best.spares_last)
    if best is None or best.peak > _WORTH_WHILE * alone.peak:
        return replace(alone, reason=_reason(best, alone.peak))
    return best


def _most_trials(size: int) -> int:
    """Return how many choices are tried out for a step of so many nodes."""
    most = max(_FEWEST_TRIALS, min(_MOST_TRIALS, _TRIED_NODES // size))
    return max(most, _QUICK_NODES // size)


def _reason(best: Trial | None, alone: int) -> str:
    if best is None:
        return "no recomputation is predicted to need less at its peak"
    return (
        f"the best recomputation is predicted to need {best.peak:,} bytes at its "
        f"peak, and plain gradients {alone:,}"
    )


def _cuttings(stretches: Stretches) -> Iterator[tuple[int, ...]]:
    """Yield the places of different cuttings, each the best by another reckoning."""
    met: set[tuple[int, ...]] = {()}
    terms = [
        Terms(stretches, held_bytes, idle)
        for held_bytes in (stretches.in_turn, stretches.at_worst)
        for idle in _IDLE
    ]
    least = [least_budget(t) for t in terms]
    for slack in _SLACKS:
        for t, budget in zip(terms, least, strict=True):
            cuts = cut_within(t, int(budget * slack))
            if cuts is not None and cuts not in met:
                met.add(cuts)
                yield tuple(stretches.places[list(cuts)].tolist())
