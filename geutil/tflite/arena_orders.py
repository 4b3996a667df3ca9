"""Orders of operations that need little memory at once.

A *state* is the set of operations that have run; how many bytes are alive in it does
not depend on their order. So whether there is an order within a limit is a question
about paths through states. It is asked for less and less: a limit that has no order is
a bound.

Most states need not be looked at. The bytes alive are submodular in the state: the more
has run before an operation, the more it frees. So where some operations end with no
more bytes alive than before, and stay within the limit on the way, they may run at
once: in any order within the limit they can be moved there.

The bytes alive are not all: offsets in an arena leave gaps. Greedy offsets depend on
the order in ways that no bound describes, so orders are tried: one operation is moved
at a time, and what makes the arena no larger is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from geutil.graph.walks import tree
from geutil.tflite.interpreter import ArenaProgram

Order = Sequence[int]
_Partial = tuple[tuple[int, ...], int, tuple[int, ...], list[int]]
"""The operations that have run, the next one, those that could run in its place, and
for each operation how many it waits for."""

_LONGEST_BURST = 48
"""So many operations are looked ahead for what ends with no more bytes alive."""
_NEAR = 0.5
"""Half of the moves start from an operation near the step where most is alive."""
_RUNS = 0.5
"""Half of the moves swap two runs of operations."""
_WINDOW = 6
"""As near as this."""
_LONGEST_RUN = 2 * _WINDOW


class LeastPeak(NamedTuple):
    """An order and the bounds of better ones."""

    order: list[int]
    peak: int
    bound: int
    states: int


def least_peak(program: ArenaProgram, *, iterations: int = 20_000) -> LeastPeak:
    """Return an order in which the fewest bytes are alive at once.

    Example:
        A sum of two branches; the one whose result is small had better run first:

        >>> from geutil.tflite.interpreter import ArenaProgram, Value
        >>> x, large = Value(10, -1, (0, 1)), Value(40, 0, (3,))
        >>> wide, small = Value(90, 1, (2,)), Value(10, 2, (3,))
        >>> program = ArenaProgram(4, [x, large, wide, small, Value(1, 3)])
        >>> program.peak([0, 1, 2, 3])
        140
        >>> found = least_peak(program)
        >>> found.order, found.peak, found.bound
        ([1, 2, 0, 3], 110, 110)
    """
    best = [*range(program.count)]
    space = _Space(program)
    upper, bound, states = program.peak(best), space.bound, 0
    # A size asked for in vain without a proof is not asked for again.
    hopeless = bound - 1
    while bound < upper and states < iterations:
        limit = bound if hopeless < bound else (hopeless + upper) // 2
        if limit <= hopeless:
            break
        asked = space.ask(limit, max((iterations - states) // 3, 1))
        states += max(asked.states, 1)
        if asked.order is not None:
            best, upper = asked.order, program.peak(asked.order)
        elif asked.is_out:
            bound = hopeless = asked.least_exceeding
            hopeless -= 1
        else:
            hopeless = limit
    return LeastPeak(best, upper, min(bound, upper), states)


class _Asked(NamedTuple):
    """The answer to the question whether there is an order within a limit."""

    order: list[int] | None
    is_out: bool
    least_exceeding: int
    states: int


class _State(NamedTuple):
    """A set of operations that have run; the last ones, and the state before them."""

    ran: int
    live: int
    ready: tuple[int, ...]
    last: tuple[int, ...]
    before: _State | None


class _Space:
    """The states of a program."""

    def __init__(self, program: ArenaProgram) -> None:
        count = program.count
        self._all = (1 << count) - 1
        self._made = [0] * count
        self._temporary = [0] * count
        for i, sizes in enumerate(program.temporaries):
            self._temporary[i] = sum(sizes)
        self._needs = [sum(1 << i for i in before) for before in program.before]
        self._next = program.behind
        # Sizes and users of what an operation may be the last to use.
        self._ends: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._start = 0
        for value in program.values:
            if value.maker >= 0:
                self._made[value.maker] += value.size
            elif value.is_kept or value.users:
                self._start += value.size
            if value.is_kept or not value.size:
                continue
            users = value.users or ((value.maker,) if value.maker >= 0 else ())
            mask = sum(1 << u for u in dict.fromkeys(users))
            for u in dict.fromkeys(users):
                self._ends[u].append((value.size, mask))
        self.bound = max(_least_alive(program), default=0)

    def ask(self, limit: int, states: int) -> _Asked:
        """Search depth first for an order within a limit: fewest bytes alive first."""
        ready = tuple(i for i, needs in enumerate(self._needs) if not needs)
        stack = [_State(0, self._start, ready, (), None)]
        seen: set[int] = set()
        least, looked = self._start + sum(self._made) + sum(self._temporary), 0
        while stack and looked < states:
            state = stack.pop()
            # All that may run at once does.
            while burst := self._free(state, limit):
                for i in burst:
                    state = self._ran(state, i)
            if state.ran == self._all:
                return _Asked(_order_of(state), False, limit, looked)
            if state.ran in seen:
                continue
            seen.add(state.ran)
            looked += 1
            behind = []
            for i in state.ready:
                peak = self._peak(state.live, i)
                if peak <= limit:
                    behind.append(self._ran(state, i))
                else:
                    least = min(least, peak)
            behind.sort(key=lambda s: s.live, reverse=True)
            stack += behind
        return _Asked(None, not stack, least, looked)

    def _peak(self, live: int, i: int) -> int:
        return live + self._made[i] + self._temporary[i]

    def _growth(self, ran: int, i: int) -> int:
        """Return how many bytes more are alive after an operation."""
        ran |= 1 << i
        freed = sum(size for size, users in self._ends[i] if not users & ~ran)
        return self._made[i] - freed

    def _ran(self, state: _State, i: int) -> _State:
        ran = state.ran | 1 << i
        new = [j for j in self._next[i] if not self._needs[j] & ~ran]
        ready = tuple(sorted({*state.ready, *new} - {i}))
        live = state.live + self._growth(state.ran, i)
        return _State(ran, live, ready, (i,), state)

    def _free(self, state: _State, limit: int) -> list[int]:
        """Return operations after which no more bytes are alive than before."""
        for i in state.ready:
            fits = self._peak(state.live, i) <= limit
            if fits and self._growth(state.ran, i) <= 0:
                return [i]
        for i in state.ready:
            burst = self._burst(state, i, limit)
            if burst:
                return burst
        return []

    def _burst(self, state: _State, first: int, limit: int) -> list[int]:
        """Return an operation and followers that use up its results."""
        ran, live = state.ran, state.live
        burst: list[int] = []
        open_ = [first]
        while open_ and len(burst) < _LONGEST_BURST:
            growths = [(self._growth(ran, i), i) for i in open_]
            fitting = [g for g in growths if self._peak(live, g[1]) <= limit]
            if not fitting:
                return []
            growth, i = min(fitting)
            open_.remove(i)
            burst.append(i)
            ran, live = ran | 1 << i, live + growth
            if live <= state.live:
                return burst
            open_ += [j for j in self._next[i] if not self._needs[j] & ~ran]
        return []


def _order_of(state: _State | None) -> list[int]:
    order: list[int] = []
    while state is not None:
        order += reversed(state.last)
        state = state.before
    return order[::-1]


def _least_alive(program: ArenaProgram) -> list[int]:
    """Return for each operation the bytes that are alive with it in any order.

    Those are of values that are made before it, or by it, and used behind it, or by it.
    """
    count = program.count
    earlier, later = [0] * count, [0] * count
    for i in range(count):
        earlier[i] = 1 << i
        for j in program.before[i]:
            earlier[i] |= earlier[j]
    for i in reversed(range(count)):
        later[i] = 1 << i
        for j in program.behind[i]:
            later[i] |= later[j]
    alive = np.zeros(count, np.int64)
    for i, sizes in enumerate(program.temporaries):
        alive[i] += sum(sizes)
    everything = (1 << count) - 1
    for value in program.values:
        if not value.size:
            continue
        at = later[value.maker] if value.maker >= 0 else everything
        if not value.is_kept:
            used = 0
            for user in value.users:
                used |= earlier[user]
            # Before any one user is enough: the value lives until its last user.
            at &= used
            at |= 1 << value.maker if value.maker >= 0 else 0
        raw = np.frombuffer(at.to_bytes(-(-count // 8), "little"), np.uint8)
        flags = np.unpackbits(raw, count=count, bitorder="little").astype(bool)
        alive[flags] += value.size
    return [int(n) for n in alive]


class LeastArena(NamedTuple):
    """An order, and whether it is known that none is better."""

    order: list[int]
    is_least: bool


def least_arena(
    program: ArenaProgram,
    cost: Callable[[Order], tuple[int, ...]],
    orders: Iterable[Order],
    *,
    enough: int,
    tries: int = 200,
) -> LeastArena:
    """Return the best of some orders, and of such that one move after another leads to.

    Example:
        >>> from geutil.tflite.interpreter import ArenaProgram, Value
        >>> values = [Value(8, 0, (1,)), Value(1, 1), Value(8, 2, (3,)), Value(1, 3)]
        >>> program = ArenaProgram(4, values)
        >>> least_arena(program, lambda o: (program.peak(o),), [[0, 2, 1, 3]], enough=9)
        LeastArena(order=[0, 1, 2, 3], is_least=True)
    """
    starts = sorted((list(order) for order in orders), key=cost)
    best = starts[0]
    if cost(best)[0] <= enough:
        return LeastArena(best, True)
    every = all_orders(program, tries)
    if every is not None:
        better = min(every, key=cost)
        return LeastArena(better if cost(better) < cost(best) else best, True)
    # A fixed seed lets the same file get the same order each time.
    mover = _Mover(program, random.Random(0))
    for start in starts:
        order = _descent(start, cost, mover, enough, tries // len(starts))
        best = order if cost(order) < cost(best) else best
    return LeastArena(best, cost(best)[0] <= enough)


def _descent(
    order: list[int],
    cost: Callable[[Order], tuple[int, ...]],
    mover: _Mover,
    enough: int,
    tries: int,
) -> list[int]:
    """Return where moves lead from an order of which none costs more."""
    least = cost(order)
    for _ in range(tries):
        if least[0] <= enough:
            break
        moved = mover.moved(order)
        found = cost(moved)
        # An equal cost is accepted, so that moves can cross a plateau.
        if found <= least:
            order, least = moved, found
    return order


def all_orders(program: ArenaProgram, most: int) -> list[list[int]] | None:
    """Return every order of a program; None if there are more than `most`.

    Example:
        >>> all_orders(ArenaProgram(3, [], after=[(0, 1)]), 5)
        [[0, 1, 2], [0, 2, 1], [2, 0, 1]]
        >>> all_orders(ArenaProgram(3, [], after=[(0, 1)]), 2)
    """
    waits = [*map(len, program.before)]
    first = tuple(i for i, n in enumerate(waits) if not n)

    def following(at: _Partial) -> Iterator[_Partial]:
        order, i, ready, waits = at
        left, behind = [*waits], program.behind[i]
        for j in behind:
            left[j] -= 1
        new = (j for j in behind if not left[j])
        ready = tuple(sorted({*ready, *new} - {i}))
        order = (*order, i)
        return ((order, j, ready, left) for j in ready)

    found: list[list[int]] = [] if first else [[]]
    starts: list[_Partial] = [((), i, first, waits) for i in first]
    for order, i, *_ in tree(starts, following):
        if len(order) == program.count - 1:
            found.append([*order, i])
        # The number of orders can be exponential, so counting ends here.
        if len(found) > most:
            return None
    return found


class _Mover:
    """Moves operations between those that they need and those that need them."""

    def __init__(self, program: ArenaProgram, chance: random.Random) -> None:
        self._program = program
        self._chance = chance
        self._before, self._behind = program.before, program.behind

    def moved(self, order: Order) -> list[int]:
        """Return an order in which one operation, or a run, stands elsewhere."""
        at = self._place(order)
        if self._chance.random() < _RUNS:
            return self._swapped(order, at)
        places = {i: place for place, i in enumerate(order)}
        i = order[at]
        low = max((places[j] for j in self._before[i]), default=-1) + 1
        high = min((places[j] for j in self._behind[i]), default=len(order)) - 1
        to = self._chance.randint(low, high)
        left = [*order[:at], *order[at + 1 :]]
        return [*left[:to], i, *left[to:]]

    def _swapped(self, order: Order, at: int) -> list[int]:
        """Swap two runs that meet at a place, as far as the later one can go."""
        size = self._chance.randint(1, _LONGEST_RUN)
        run = order[at : at + size]
        needed = {j for i in run for j in self._before[i]}
        low = at
        lowest = max(at - self._chance.randint(1, _LONGEST_RUN), 0)
        while low > lowest and order[low - 1] not in needed:
            low -= 1
        return [*order[:low], *run, *order[low:at], *order[at + size :]]

    def _place(self, order: Order) -> int:
        count = len(order)
        if self._chance.random() < _NEAR:
            alive = self._program.alive(order)
            near = max(range(count), key=alive.__getitem__)
            place = near + self._chance.randint(-_WINDOW, _WINDOW)
            return min(max(place, 0), count - 1)
        return self._chance.randrange(count)
