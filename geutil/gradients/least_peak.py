"""The least predicted peak: cuts of the forward pass, tried on the whole step.

A cut is a place in the forward pass; the tensors made before it and read after it are
kept together. Cuts are chosen by the costs of each stretch between two of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

from geutil.gradients.segments import (
    Keeps,
    StepProgram,
    Updates,
    plan_recomputation,
    program_of,
    recomputable,
)
from geutil.gradients.step import PlainStep, Recomputation
from geutil.graph import runtime
from geutil.graph.op_types import SUMS
from geutil.graph.types import Operation, Tensor
from geutil.memory.costs import multiply_adds, tensor_bytes, tensor_elements
from geutil.memory.kernels.cpu import aliases

NEVER = 1 << 44
"""More than there is; even thousands of these can be added up."""


@dataclass(frozen=True, eq=False)
class ForwardBuffer:
    """Tensors that share one piece of memory."""

    # Each with the place that makes it and the last one that reads it.
    tensors: list[tuple[Tensor, int, int]]
    bytes: int
    # Of keeping it, in bytes; `NEVER` where that shall not be.
    price: int
    # The place that makes it, and the last that reads it when the pass runs again.
    made: int
    last: int
    # The numbers of the backward ops: behind all, and -1, if none reads it.
    first_read: int
    last_read: int


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward ops that would be run again if nothing were kept by choice."""

    # In topological order; the place of an op is its index.
    ops: Sequence[Operation]
    # Negligible tensors are left out.
    buffers: Sequence[ForwardBuffer]
    # The number of backward ops.
    end: int


def read_forward(step: PlainStep, always: Keeps, smallest: int = 0) -> ForwardPass:
    """Return the part of a step's forward pass that could be run again."""
    # Tensors of fewer elements than `smallest` are not chosen, except those that reach
    # far: the mask of an attention, say, which each layer reads.
    read = [(r.tensor, r.op) for r in step.edges.reads]
    needed = [(t, op) for t, op in read if not always(t)]
    ops = _ordered(step, recomputable(step, always), read)
    place = {op: i for i, op in enumerate(ops)}
    turn = {op: i for i, op in enumerate(step.backward)}
    reads: dict[int, tuple[int, int]] = {}
    for t, reader in needed:
        first, _ = reads.get(id(t), (turn[reader], 0))
        reads[id(t)] = (first, turn[reader])
    last = {id(t): i for i, op in enumerate(ops) for t in op.inputs}
    buffers = []
    groups = _sharing(ops, place, always)
    matters = 0.01 * sum(tensor_bytes(group[0]) for group in groups)
    for group in groups:
        starts = [place[t.op] for t in group]
        ends = [last.get(id(t), place[t.op]) for t in group]
        turns = [reads[id(t)] for t in group if id(t) in reads]
        # One that reaches over a tenth of the pass hinders all its cuts.
        far = max(ends) - min(starts) > 0.1 * len(ops)
        least = 0 if far and tensor_bytes(group[0]) < matters else smallest
        buffers.append(
            ForwardBuffer(
                tensors=list(zip(group, starts, ends, strict=True)),
                bytes=tensor_bytes(group[0]),
                price=max(_price(t, least) for t in group),
                made=min(starts),
                last=max(ends),
                first_read=min((first for first, _ in turns), default=len(turn)),
                last_read=max((latest for _, latest in turns), default=-1),
            )
        )
    return ForwardPass(ops, buffers, len(turn))


def _ordered(
    step: PlainStep,
    ops: Iterable[Operation],
    read: Sequence[tuple[Tensor, Operation]],
) -> list[Operation]:
    """Put helpers of gradient functions behind their inputs, not at the end."""
    # One without inputs (zeros, say) goes where the other inputs of its reader are.
    place = step.edges.forward
    near = _places_of_others(step, place, read)
    key: dict[Operation, int] = {}
    for op in ops:
        if not step.is_helper(op):
            key[op] = place[op]
            continue
        producers = (t.op for t in op.inputs if t.op in key or not step.is_helper(t.op))
        # A tensor that is no part of the step was there before.
        behind = [key[m] if m in key else place.get(m, -1) for m in producers]
        key[op] = max(behind) if behind else near.get(op, len(place))
    return sorted(key, key=key.__getitem__)


def _places_of_others(
    step: PlainStep,
    place: Mapping[Operation, int],
    read: Sequence[tuple[Tensor, Operation]],
) -> dict[Operation, int]:
    """Return for each op where its first backward reader's other inputs are made."""
    beside: dict[Operation, int] = {}
    for t, reader in read:
        if not step.is_helper(t.op):
            beside[reader] = max(beside.get(reader, 0), place.get(t.op, 0))
    near: dict[Operation, int] = {}
    for t, reader in read:
        near.setdefault(t.op, beside.get(reader, len(place)))
    return near


def _sharing(
    ops: Sequence[Operation], place: dict[Operation, int], always: Keeps
) -> list[list[Tensor]]:
    """Return the tensors that are not always kept, in groups of one buffer each."""
    groups: dict[int, list[Tensor]] = {}
    for op in ops:
        source = {out: op.inputs[place] for out, place in aliases(op)}
        for index, t in enumerate(op.outputs):
            if always(t):
                continue
            group = groups.get(id(source.get(index)))
            if group is None:
                group = []
            group.append(t)
            groups[id(t)] = group
    # A group is listed once for each of its tensors.
    return list({id(group): group for group in groups.values()}.values())


def _is_passed_over(tensor: Tensor) -> bool:
    """Return whether a tensor only goes from one sum into the next."""
    # Grappler adds up a chain of sums in one op, in an order of its own, unless another
    # op reads a sum in between. To keep that one would change how the forward pass
    # rounds; and the next sum is no larger.
    readers = tensor.consumers()
    return tensor.op.type in SUMS and len(readers) == 1 and readers[0].type in SUMS


def _price(tensor: Tensor, smallest: int) -> int:
    if tensor_elements(tensor) < smallest or _is_passed_over(tensor):
        return NEVER
    size = tensor_bytes(tensor)
    if tensor.op.type == "Cast":
        # More than both take, so that the source is kept, which is at hand before.
        return max(size, tensor_bytes(tensor.op.inputs[0])) + 1
    return size


Ints = npt.NDArray[np.int64]

MOST_CUTS = 320
"""How many places are looked at: the work for each pair of them is cheap."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """The stretches between any two cuts: triangles above the diagonals."""

    # The place of each cut: behind the op of this number.
    places: Ints
    # Bytes that cut j keeps in addition to cut i; of these, the bytes that the backward
    # pass does not read itself.
    kept: Ints
    idle: Ints
    # Bytes held, but for those kept at i, while the stretch from i to j is run again
    # and passed backwards, each backward op as soon as it can; and at worst, if all is
    # held until the stretch is done.
    in_turn: Ints
    at_worst: Ints
    # Multiply-adds to run the stretch again.
    cost: Ints


def measure_stretches(
    forward: ForwardPass, gradient_bytes: Sequence[int], most: int = MOST_CUTS
) -> Stretches:
    """Return the costs of each stretch between two of the best cuts."""
    # `gradient_bytes` are those of the backward pass alone at each of its ops.
    costs = np.array([multiply_adds(op) for op in forward.ops], np.int64)
    places = _best_places(forward, costs, most)
    table = _Table(forward, places)
    gradients = np.append(np.asarray(gradient_bytes, np.int64), 0)
    in_turn, at_worst = _held(forward, table, gradients)
    return Stretches(
        places=places,
        kept=table.crossing(table.prices),
        idle=table.crossing(np.where(table.last_read < 0, table.prices, 0)),
        in_turn=in_turn,
        at_worst=at_worst,
        cost=_costs(table, costs),
    )


def crossing_tensors(
    buffers: Sequence[ForwardBuffer], places: Sequence[int]
) -> list[Tensor]:
    """Return the tensors that cross one of some cuts, whose places ascend."""
    tensors = []
    for buffer in buffers:
        for tensor, start, last in buffer.tensors:
            cut = bisect_left(places, start)
            if cut < len(places) and places[cut] < last:
                tensors.append(tensor)
    return tensors


def _best_places(forward: ForwardPass, costs: Ints, most: int) -> Ints:
    """Return the start, the places where least is kept (all if few), and the end."""
    count = len(forward.ops)
    crossing = np.zeros(count + 1, np.int64)
    dear = np.zeros(count + 1, np.int64)
    needed = np.zeros(count + 1, np.int64)
    for buffer in forward.buffers:
        crossing[buffer.made] += buffer.price
        crossing[buffer.last] -= buffer.price
        dear[buffer.made] += buffer.price > buffer.bytes
        dear[buffer.last] -= buffer.price > buffer.bytes
        if buffer.last_read >= 0:
            needed[buffer.made] += buffer.bytes
    crossing = np.cumsum(crossing)[:count]
    before = np.append(np.iinfo(np.int64).max, crossing[:-1])
    after = np.append(crossing[1:], np.iinfo(np.int64).max)
    least = crossing <= np.minimum(before, after)
    allowed = (crossing > 0) & (crossing < NEVER)
    low = np.flatnonzero(allowed & (least | (np.cumsum(dear)[:count] == 0)))
    if len(low) > most:
        low = low[least[low]]
    if len(low) > most:
        # The best place of each portion of about as many bytes.
        needed = np.cumsum(needed)[:count]
        portion = needed[low] * most // max(int(needed[-1]) + 1, 1)
        order = np.lexsort((-costs[low], crossing[low], portion))
        first = np.unique(portion[order], return_index=True)[1]
        low = np.sort(low[order[first]])
    return np.concatenate(([-1], low, [count]))


class _Table:
    """The buffers as arrays, and between which cuts each is made and last read."""

    def __init__(self, forward: ForwardPass, places: Ints) -> None:
        buffers = forward.buffers
        self.cuts = len(places)
        self.places = places
        rows = [
            (b.made, b.last, b.bytes, b.price, b.first_read, b.last_read)
            for b in buffers
        ]
        columns = np.array(rows, np.int64).reshape(-1, 6).T
        self.made, self.last, self.bytes, self.prices = columns[:4]
        self.first_read, self.last_read = columns[4:]
        # The first cut behind the op that makes it, and behind its last reader.
        self.stretch = np.searchsorted(places, self.made)
        self.until = np.searchsorted(places, self.last)

    def crossing(self, weights: Ints) -> Ints:
        """Return for i, j the weights of tensors made from i to j and read after."""
        differences = np.zeros((self.cuts, self.cuts + 1), np.int64)
        np.add.at(differences, (self.stretch, self.stretch), weights)
        np.add.at(differences, (self.stretch, self.until), -weights)
        across = np.cumsum(differences, axis=1)[:, :-1]
        from_here = np.cumsum(across[::-1], axis=0)[::-1]
        return np.vstack((from_here[1:], np.zeros((1, self.cuts), np.int64)))


def _costs(table: _Table, costs: Ints) -> Ints:
    """Return the cost to run each stretch again, less its kept tensors."""
    behind = np.append(0, np.cumsum(costs))
    at = behind[np.minimum(table.places + 1, len(costs))]
    whole = at[np.newaxis, :] - at[:, np.newaxis]
    saved = table.crossing(costs[table.made])
    cost = np.maximum(whole - saved, 0)
    # The first inputs of the backward pass are not run again.
    cost[:, -1] = 0
    return cost


def _held(forward: ForwardPass, table: _Table, gradients: Ints) -> tuple[Ints, Ints]:
    starts = _turns(forward, table)
    again = _run_again(forward, table, gradients[starts])
    in_turn = np.zeros((table.cuts, table.cuts), np.int64)
    at_worst = np.zeros_like(in_turn)
    most = np.maximum.accumulate
    ending = np.zeros(forward.end + 1, np.int64)
    needed = table.last_read >= 0
    for i in range(table.cuts - 2, -1, -1):
        new = needed & (table.stretch == i + 1)
        np.add.at(ending, table.last_read[new], table.bytes[new])
        alive = np.cumsum(ending[::-1])[::-1]
        # Stretch i to i+1 comes last in the backward pass: its addition is first here.
        bounds = starts[i : table.cuts][::-1]
        both = _most_between(alive + gradients, bounds)[::-1]
        flowing = _most_between(gradients, bounds)[::-1]
        in_turn[i, i + 1 :] = most(both)
        at_worst[i, i + 1 :] = most(flowing) + alive[starts[i + 1 :]]
    return np.maximum(in_turn, again), np.maximum(at_worst, again)


def _turns(forward: ForwardPass, table: _Table) -> Ints:
    """Return, for each cut, when the backward pass first needs a tensor before it."""
    # A tensor that crosses the cut is kept, so it does not count.
    first = np.full(table.cuts + 1, forward.end, np.int64)
    needed = table.last_read >= 0
    np.minimum.at(first, table.until[needed], table.first_read[needed])
    turns = np.minimum.accumulate(first)[:-1]
    turns[-1] = 0
    return turns


def _run_again(forward: ForwardPass, table: _Table, started: Ints) -> Ints:
    """Return the most that is held while each stretch is run again."""
    count = len(forward.ops)
    passing = np.zeros(count + 2, np.int64)
    made_bytes = np.zeros(count + 2, np.int64)
    needed = table.last_read >= 0
    np.add.at(made_bytes, table.made[needed], table.bytes[needed])
    np.add.at(passing, table.made[~needed], table.bytes[~needed])
    np.add.at(passing, table.last[~needed] + 1, -table.bytes[~needed])
    held_bytes = np.cumsum(made_bytes)
    total = (held_bytes + np.cumsum(passing))[:count]
    bounds = np.minimum(table.places + 1, count)
    within = np.append(0, _most_between(total, bounds))
    before = np.append(0, held_bytes)[bounds]
    again = np.zeros((table.cuts, table.cuts), np.int64)
    for i in range(table.cuts - 1):
        reached = np.maximum.accumulate(within[i + 1 :])
        again[i, i + 1 :] = reached - before[i] + started[i + 1 :]
    return again


def _most_between(values: Ints, bounds: Ints) -> Ints:
    """Return the maximum of `values` in each interval of ascending bounds, or 0."""
    maxima = np.zeros(len(bounds) - 1, np.int64)
    full = np.flatnonzero(bounds[1:] > bounds[:-1])
    if len(full):
        ends = np.append(bounds[full], bounds[full[-1] + 1])
        # Intervals that are not empty lie side by side.
        maxima[full] = np.maximum.reduceat(values[: ends[-1]], ends[:-1])
    return maxima


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
