"""Orders of a small arena: the bytes alive are not all, since offsets leave gaps.

Greedy offsets depend on the order in ways that no bound describes, so orders are tried:
one operation is moved at a time, and what makes the arena no larger is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from geutil.memory.least_peak import ArenaProgram

Order = Sequence[int]

_NEAR = 0.5
"""Half of the moves start from an operation near the step where most is alive."""
_RUNS = 0.5
"""Half of the moves swap two runs of operations."""
_LONGEST_RUN = 12
_WINDOW = 6
"""As near as this."""


class LeastArena(NamedTuple):
    """An order, and whether it is known that none is better.

    Attributes:
        order: the operations.
        is_least: whether no order has a smaller arena: it is no larger than what is
            enough, or all orders were tried.
    """

    order: list[int]
    is_least: bool


def least_arena(
    program: ArenaProgram,
    cost: Callable[[Order], tuple[int, ...]],
    orders: Iterable[Order],
    *,
    enough: int,
    tries: int = 200,
    seed: int = 0,
) -> LeastArena:
    """Return the best of some orders, and of such that one move after another leads to.

    Where there are no more orders than tries, all are tried.

    Args:
        program: the operations.
        cost: the bytes of the arena in an order; what follows them decides between
            orders of one size.
        orders: that are known; of equal ones the first is taken.
        enough: no order is looked for if the arena is no larger than this.
        tries: how many are tried besides; as many from each that is known.
        seed: of the moves.

    Cost: `tries` times that of `cost`, and linear in operations and edges.

    Example:
        >>> from geutil.memory.least_peak import Value
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
    mover = _Mover(program, random.Random(seed))
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
        if found <= least:
            order, least = moved, found
    return order


def all_orders(program: ArenaProgram, most: int) -> list[list[int]] | None:
    """Return every order of a program; None if there are more than `most`.

    Cost: `most` times operations and edges.

    Example:
        >>> all_orders(ArenaProgram(3, [], after=[(0, 1)]), 5)
        [[0, 1, 2], [0, 2, 1], [2, 0, 1]]
        >>> all_orders(ArenaProgram(3, [], after=[(0, 1)]), 2)
    """
    waits = [0] * program.count
    behind: list[list[int]] = [[] for _ in waits]
    for before, later in program.edges:
        waits[later] += 1
        behind[before].append(later)
    found: list[list[int]] = []
    order: list[int] = []
    # What may still run in each step, behind what has run; the last is tried next.
    choices = [[i for i, n in enumerate(waits) if not n][::-1]]
    ready = [list(choices[0])]
    while choices:
        if len(order) == program.count:
            found.append(list(order))
            if len(found) > most:
                return None
        if choices[-1]:
            i = choices[-1].pop()
            order.append(i)
            for j in behind[i]:
                waits[j] -= 1
            new = [j for j in behind[i] if not waits[j]]
            left = sorted([*(j for j in ready[-1] if j != i), *new], reverse=True)
            ready.append(left)
            choices.append(list(left))
            continue
        choices.pop()
        ready.pop()
        if order:
            for j in behind[order.pop()]:
                waits[j] += 1
    return found


class _Mover:
    """Moves operations within what they need and what needs them."""

    def __init__(self, program: ArenaProgram, chance: random.Random) -> None:
        self._program = program
        self._chance = chance
        self._before: list[list[int]] = [[] for _ in range(program.count)]
        self._behind: list[list[int]] = [[] for _ in range(program.count)]
        for before, behind in program.edges:
            self._before[behind].append(before)
            self._behind[before].append(behind)

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
