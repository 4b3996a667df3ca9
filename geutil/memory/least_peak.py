"""The order of operations in which the fewest bytes are alive at once.

A *state* is the set of operations that have run; how many bytes are alive in it does
not depend on their order. So whether there is an order within a limit is a question
about paths through states. It is asked for less and less: a limit that has no order is
a bound.

Most states need not be looked at. The bytes alive are submodular in the state: the more
has run before an operation, the more it frees. So where some operations end with no
more bytes alive than before, and stay within the limit on the way, they may run at
once: in any order within the limit they can be moved there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from geutil.errors import PlanError
from geutil.memory.arena_offsets import Buffer, alive_bytes

_LONGEST_BURST = 48
"""So many operations are looked ahead for what ends with no more bytes alive."""


class Value(NamedTuple):
    """What operations make, read, and share one buffer for.

    Attributes:
        size: in bytes.
        maker: the first operation that writes it; -1 if it is there from the start,
            which takes no memory if nothing uses or keeps it.
        users: the others that read it or write into it.
        is_kept: whether it is alive to the end.
    """

    size: int
    maker: int
    users: tuple[int, ...] = ()
    is_kept: bool = False


@dataclass(frozen=True)
class ArenaProgram:
    """Operations, numbered in an order in which they can run, and what they make.

    Attributes:
        count: how many operations there are.
        values: what they make and read.
        temporaries: for each operation, the bytes of buffers that are alive only while
            it runs.
        after: pairs (earlier, later) of operations that must keep this order besides:
            the later one reads what the earlier one wrote into a shared buffer, say.
    """

    count: int
    values: Sequence[Value]
    temporaries: Sequence[Sequence[int]] = ()
    after: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for before, behind in self.edges:
            if before >= behind:
                raise PlanError(
                    f"operation {behind} runs before {before}, whose result it needs; "
                    "number them in an order in which they can run"
                )

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs (earlier, later) of operations: by values, and given ones."""
        pairs = dict.fromkeys(self.after)
        for value in self.values:
            if value.maker >= 0:
                pairs.update(dict.fromkeys((value.maker, u) for u in value.users))
        return list(pairs)

    def buffers(self, order: Sequence[int]) -> list[Buffer]:
        """Return the buffers of an order: of the values, then the temporary ones."""
        place = [0] * self.count
        for step, i in enumerate(order):
            place[i] = step
        end = self.count - 1
        buffers = []
        for value in self.values:
            first = place[value.maker] if value.maker >= 0 else 0
            last = max((place[u] for u in value.users), default=first)
            last = end if value.is_kept else last
            stays = value.is_kept and not first
            is_needed = value.maker >= 0 or value.is_kept or bool(value.users)
            buffers.append(Buffer(first, last, is_needed * value.size, stays))
        for i, sizes in enumerate(self.temporaries):
            buffers += [Buffer(place[i], place[i], size) for size in sizes]
        return buffers

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return how many bytes are alive in each step of an order.

        Cost: linear in operations and values.
        """
        return alive_bytes(self.buffers(order), self.count)

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that are alive at once in an order.

        Cost: linear in operations and values.
        """
        return max(self.alive(order), default=0)


class LeastPeak(NamedTuple):
    """An order and what is known of better ones.

    Attributes:
        order: the operations.
        peak: the most bytes that are alive at once in it.
        bound: no order has a peak below this; the order is proven best where it is
            equal to the peak.
        states: how many were looked at.
    """

    order: list[int]
    peak: int
    bound: int
    states: int


def least_peak(
    program: ArenaProgram,
    known: Iterable[Sequence[int]] = (),
    *,
    iterations: int = 20_000,
) -> LeastPeak:
    """Return an order in which the fewest bytes are alive at once.

    Args:
        program: the operations; their own order is known.
        known: other orders that are known.
        iterations: how many states are looked at before the best order that was found
            is returned, unproven.

    Cost: exponential at worst, and linear in `iterations`, each of which takes the
        operations that are ready, and those that may follow them at once: some 100 us.
        Chains and networks whose largest step is the same in any order take none.

    Example:
        A sum of two branches; the one whose result is small had better run first:

        >>> x, large = Value(10, -1, (0, 1)), Value(40, 0, (3,))
        >>> wide, small = Value(90, 1, (2,)), Value(10, 2, (3,))
        >>> program = ArenaProgram(4, [x, large, wide, small, Value(1, 3)])
        >>> program.peak([0, 1, 2, 3])
        140
        >>> found = least_peak(program)
        >>> found.order, found.peak, found.bound
        ([1, 2, 0, 3], 110, 110)
    """
    orders = [list(range(program.count)), *map(list, known)]
    best = min(orders, key=program.peak)
    space = _Space(program)
    upper, bound, states = program.peak(best), space.bound, 0
    # What was asked for in vain without a proof is not asked for again.
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
    """What came of the question whether there is an order within a limit."""

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
        self._needs = [0] * count
        self._next: list[list[int]] = [[] for _ in range(count)]
        for before, behind in program.edges:
            self._needs[behind] |= 1 << before
            self._next[before].append(behind)
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
        self.bound = max(_least_alive(program, self._needs, self._next), default=0)

    def ask(self, limit: int, states: int) -> _Asked:
        """Tell whether there is an order within a limit, after so many states at most.

        Depth first: what ends with the fewest bytes alive is looked at first.
        """
        ready = tuple(i for i, needs in enumerate(self._needs) if not needs)
        stack = [_State(0, self._start, ready, (), None)]
        seen: set[int] = set()
        least, looked = self._all_bytes(), 0
        while stack and looked < states:
            state = self._advanced(stack.pop(), limit)
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

    def _all_bytes(self) -> int:
        return self._start + sum(self._made) + sum(self._temporary)

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

    def _advanced(self, state: _State, limit: int) -> _State:
        """Return the state after all that may run at once."""
        while True:
            burst = self._free(state, limit)
            if not burst:
                return state
            for i in burst:
                state = self._ran(state, i)

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
        """Return an operation and some that it leads to, if they use up what they make.

        Of those that are ready because of it, the one after which the fewest bytes are
        alive runs next.
        """
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


def _least_alive(
    program: ArenaProgram, needs: Sequence[int], behind: Sequence[Sequence[int]]
) -> list[int]:
    """Return for each operation the bytes that are alive with it in any order.

    Those are of values that are made before it, or by it, and used behind it, or by it.
    """
    count = program.count
    earlier, later = [0] * count, [0] * count
    for i in range(count):
        earlier[i] = 1 << i
        for j in _places(needs[i]):
            earlier[i] |= earlier[j]
    for i in reversed(range(count)):
        later[i] = 1 << i
        for j in behind[i]:
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
            at &= used
            at |= 1 << value.maker if value.maker >= 0 else 0
        alive[_flags(at, count)] += value.size
    return [int(n) for n in alive]


def _places(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _flags(mask: int, count: int) -> np.ndarray[Any, Any]:
    raw = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").astype(bool)
