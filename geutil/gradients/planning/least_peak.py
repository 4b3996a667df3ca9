"""The least predicted peak: cuttings of the forward pass, tried on the whole step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice

import numpy as np

from geutil.gradients.planning.cuts import (
    ForwardPass,
    Ints,
    Stretches,
    crossing_tensors,
    measure_stretches,
    read_forward,
)
from geutil.gradients.prediction import StepProgram, Updates, program_of
from geutil.gradients.segments import Keeps, Recomputation, plan_recomputation
from geutil.gradients.step import PlainStep
from geutil.graph import runtime
from geutil.graph.types import Tensor
from geutil.memory.costs import multiply_adds, tensor_bytes


@dataclass(frozen=True, eq=False)
class Trial:
    """A choice of kept tensors, and its outcome."""

    kept: tuple[Tensor, ...]
    # Predicted, in bytes.
    peak: int
    # The multiply-adds that are done again, and the bytes of the tensors.
    cost: int
    held: int
    # None if nothing is recomputed.
    plan: Recomputation | None = None
    # True if the ops that the backward pass starts with are not recomputed.
    spares_last: bool = True
    # That of the planner's schedule that it is; 0 if it is none.
    scheduled_peak: int = 0
    # No schedule within the same budget takes less extra time, as a part of the time of
    # the step; 0 if nothing is known of that.
    bound: float = 0.0
    # Why nothing is recomputed, where that was looked for.
    reason: str | None = None


class Trials:
    """Simulates choices of kept tensors, besides those always kept, for one step."""

    # `returns` gives the kept tensors of a choice that wait on another device
    # meanwhile. Of choices whose peak is `enough` or less, the one with the fewest such
    # bytes is best: they take time.

    def __init__(
        self,
        step: PlainStep,
        always: Keeps,
        *,
        updates: Updates = "none",
        returns: Callable[[Recomputation], Recomputation] | None = None,
        enough: int = 0,
    ) -> None:
        self._step, self._always = step, always
        self.returns, self.enough = returns, enough
        self._cost_of = cache(multiply_adds)
        plain = updates == "none"
        self.program = program_of(step) if plain else StepProgram(step, updates=updates)

    def compact(self) -> Trials:
        """Return trials of the step without tiny tensors; see `StepProgram.compact`."""
        result = copy(self)
        result.program = self.program.compact()
        return result

    def without(self) -> Trial:
        """Return the trial of plain gradients, put in order."""
        return self._trial((), None)

    def run(self, kept_tensors: Iterable[Tensor], *, spare_last: bool = True) -> Trial:
        """Return the trial of a choice; `spare_last` as in `plan_recomputation`."""
        chosen = tuple(kept_tensors)
        ids = frozenset(map(id, chosen))
        plan = plan_recomputation(
            self._step,
            lambda t: id(t) in ids or self._always(t),
            spare_last=spare_last,
        )
        return self._trial(chosen, self.returns(plan) if self.returns else plan)

    def scheduled(self, plan: Recomputation, peak: int = 0) -> Trial:
        """Return the trial of a recomputation whose schedule has some peak."""
        chosen = tuple(t for t in plan.kept if not self._always(t))
        return replace(self._trial(chosen, plan), scheduled_peak=peak)

    def _trial(self, kept: tuple[Tensor, ...], plan: Recomputation | None) -> Trial:
        held = sum(map(tensor_bytes, kept))
        if plan is None:
            return Trial(kept, self.program.peak(), 0, held)
        peak = self.program.peak(plan.segments, plan.places)
        return Trial(kept, peak, sum(map(self._cost_of, plan.run_again)), held, plan)


@dataclass(frozen=True, eq=False)
class Terms:
    """How stretches and kept tensors are reckoned."""

    stretches: Stretches
    # The bytes for each stretch, `stretches.in_turn` or `stretches.at_worst`.
    held: Ints
    # How much more a kept tensor counts that the backward pass does not read itself:
    # its inputs would be held for a while anyway.
    idle: float = 0.0


def cut_within(terms: Terms, budget: int) -> tuple[int, ...] | None:
    """Return the cuts that keep least among those within a budget, or None."""
    # The bytes kept up to a cut are all that later stretches need to know of the cuts
    # before, and fewer are never worse; so for each cut the best way to it is found
    # from the ways to the cuts before it. Of several, the one with less to compute is
    # taken. Quadratic in the number of cuts, in numpy.
    # The bytes kept that each stretch adds, and its part of the score.
    stretches = terms.stretches
    added = stretches.kept + terms.idle * stretches.idle
    whole = float(stretches.cost[0].max())
    # To break ties: all ops are worth a hundredth of all bytes.
    worth = 0.01 * float(terms.held[0, -1]) / max(whole, 1.0)
    score_added = added + worth * stretches.cost
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
    """Return a budget within `precision` of the least that some cuts keep."""
    high = int(terms.held[0, -1])
    low = 0
    while high - low > max(1, precision * high):
        middle = (low + high) // 2
        if cut_within(terms, middle) is None:
            low = middle
        else:
            high = middle
    return high


AS_GOOD = 1.01
"""Of choices whose peaks differ by less, the one with less compute is taken."""


Cuts = tuple[int, ...]
"""The places of cuts, ascending."""


class CuttingSearch:
    """Tries cuttings, their places in order, each choice of tensors once."""

    # `among_others`: other steps hold their kept tensors at the same time. How many is
    # not known; kept bytes count as if one more did so.

    def __init__(
        self,
        forward: ForwardPass,
        trials: Trials,
        places: Iterable[int],
        most: int,
        *,
        among_others: bool = False,
    ) -> None:
        self._forward, self._trials, self._places = forward, trials, list(places)
        self._left, self._among_others = most, among_others
        self._known: dict[Cuts, Trial] = {}
        # Different cuts may keep the same tensors, which are simulated once.
        self._same: dict[tuple[int, ...], Trial] = {}

    def best(self) -> Trial | None:
        """Return the choice with the least to compute of those with the least peak."""
        tried = self._same.values()
        enough = [trial for trial in tried if trial.peak <= self._trials.enough]
        if enough:
            return min(enough, key=lambda t: (t.held, t.cost, t.peak))
        least = min(map(self._bytes, tried), default=0)
        good = (trial for trial in tried if self._bytes(trial) <= AS_GOOD * least)
        return min(good, key=lambda t: (t.cost, self._bytes(t)), default=None)

    def _bytes(self, trial: Trial) -> int:
        return trial.peak + trial.held if self._among_others else trial.peak

    def start(self, cuttings: Iterable[Cuts]) -> None:
        """Try cuttings out."""
        for cuts in cuttings:
            self._try(cuts)

    def descend(self) -> None:
        """Leave out, shift or add one cut at a time while that lowers the peak."""
        # Cuts are added where there are so few places that all of them can be tried.
        # Where that leads no further, it goes on from the next best cutting so far.
        left_alone: set[Cuts] = set()
        while self._left > 0 and len(left_alone) < 8:
            open_cuts = [cuts for cuts in self._known if cuts not in left_alone]
            if not open_cuts:
                return
            best = min(open_cuts, key=lambda cuts: _rank(self._known[cuts]))
            if not self._finds_better(best):
                left_alone.add(best)

    def sweep(self) -> None:
        """Try all cuttings of one cut, then of two and three, while allowed."""
        # In a small graph nothing is left to chance then.
        for count in range(1, 4):
            if math.comb(len(self._places), count) > self._left:
                return
            self.start(combinations(self._places, count))

    def recompute_last(self, most: int) -> None:
        """Try the best choices with the last segment recomputed as well."""
        # With the end of the forward pass kept, which no cut reaches, and without.
        last = len(self._forward.ops) - 1
        made_last = (b for b in self._forward.buffers if b.made == last)
        ends = [t for b in made_last for t, _, _ in b.tensors]
        forms = ([], ends) if ends else ([],)
        best = sorted(self._same.values(), key=_rank)
        every = ((*trial.kept, *others) for trial in best for others in forms)
        for kept in islice(every, most):
            full = self._trials.run(kept, spare_last=False)
            self._same[(*map(id, kept), 0)] = replace(full, spares_last=False)

    def _finds_better(self, cuts: Cuts) -> bool:
        for changed in self._changes(cuts):
            if self._left <= 0:
                break
            if changed not in self._known:
                trial = self._try(changed)
                if trial and _rank(trial) < _rank(self._known[cuts]):
                    return True
        return False

    def _changes(self, cuts: Cuts) -> Iterator[Cuts]:
        if len(cuts) > 1:
            yield from reversed([*combinations(cuts, len(cuts) - 1)])
        number = {place: n for n, place in enumerate(self._places)}
        for step in (-1, 1):
            for i, place in enumerate(cuts):
                n = number[place] + step
                if 0 <= n < len(self._places) and self._places[n] not in cuts:
                    yield (*cuts[:i], self._places[n], *cuts[i + 1 :])
        # New cuts are many: they are tried only if all of them can be.
        if len(self._places) <= self._left:
            for place in self._places:
                if place not in cuts:
                    yield tuple(sorted((*cuts, place)))

    def _try(self, cuts: Cuts) -> Trial | None:
        """Return the trial of a cutting, or None if it may not be tried any more."""
        if cuts not in self._known:
            trial = self.run(crossing_tensors(self._forward.buffers, cuts))
            if trial:
                self._known[cuts] = trial
        return self._known.get(cuts)

    def run(self, kept_tensors: Sequence[Tensor]) -> Trial | None:
        """Return the trial of a choice, or None if it may not be tried any more."""
        key = tuple(map(id, kept_tensors))
        if key not in self._same:
            if self._left <= 0:
                return None
            self._left -= 1
            self._same[key] = self._trials.run(kept_tensors)
        return self._same[key]


def _rank(trial: Trial) -> tuple[int, int]:
    return trial.peak, trial.cost


_SLACKS = (1.0, 1.02, 1.05, 1.1)
"""The budgets to try, in parts of the least: the reckoning is not exact."""
_IDLE = (0.0, 0.1)
"""The weights of idle tensors to try. Of both tables together: in a chain 1.0 with 0.1
is best alone, by 1.8 %, in an encoder 1.05 with 0.1, by 1.9 %, in a U-Net 1.1 with 0.0,
by 0.4 % (benchmarks.networks, before cuts are shifted)."""


def choose_for_memory(
    step: PlainStep,
    always: Keeps,
    min_checkpoint_size: int = 0,
    *,
    among_others: bool = False,
    others: Iterable[Sequence[Tensor]] = (),
    trials: Trials | None = None,
) -> Trial:
    """Return the tensors to keep for the least peak, or none and the reason."""
    # No op runs more than once again. The forward pass is cut into stretches such that
    # the fullest of them is as small as can be: those near the loss are shorter, since
    # most kept tensors are still held when the backward pass is there. Several
    # cuttings, and `others`, are then simulated, and the best is taken, unless plain
    # gradients are.
    forward = read_forward(step, always, min_checkpoint_size)
    trials = trials or Trials(step, always)
    alone = trials.without()
    # The order is the executor's where none is better.
    alone = replace(alone, peak=min(trials.program.plain_peak(), alone.peak))
    if not forward.buffers:
        reason = "the backward pass reads nothing that could be recomputed"
        return replace(alone, reason=reason)
    gradient_bytes = trials.program.gradient_bytes(step.backward)
    stretches = measure_stretches(forward, gradient_bytes)
    places = stretches.places[1:-1].tolist()
    # 12 to 60 choices are tried out, until 80,000 nodes were simulated; in small graphs
    # more, for 12,000 nodes, which takes some 0.2 s. In two of them, or a third, the
    # last segment is recomputed.
    size = trials.program.size
    most = max(12, min(60, 80_000 // size), 12_000 // size)
    full = most // 3 if most > 60 else 2
    # XLA's own order holds more where the last segment runs again at once.
    full = 0 if runtime.is_compiled_by_xla(step.graph) else full
    is_large = size > 1000
    tried = trials.compact() if is_large else trials
    # The best one of a large step is tried once more, whole.
    left = most - full - is_large
    search = CuttingSearch(forward, tried, places, left, among_others=among_others)
    for other in filter(None, others):
        search.run(other)
    search.start(_cuttings(stretches))
    if trials.returns:
        # A tensor that waits elsewhere costs nothing here, however many cuts there are.
        search.start(tuple(places[::every]) for every in (1, 2, 3, 4, 6, 8, 12))
    # A sweep finds cuttings that single steps do not reach; its best is then refined.
    search.descend()
    search.sweep()
    search.descend()
    search.recompute_last(full)
    best = search.best()
    if best and is_large:
        exact = trials.run(best.kept, spare_last=best.spares_last)
        best = replace(exact, spares_last=best.spares_last)
    if best is None:
        reason = "no recomputation is predicted to need less at its peak"
        return replace(alone, reason=reason)
    if best.peak > 0.98 * alone.peak:
        reason = (
            f"the best recomputation is predicted to need {best.peak:,} bytes at its "
            f"peak, and plain gradients {alone.peak:,}"
        )
        return replace(alone, reason=reason)
    return best


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
