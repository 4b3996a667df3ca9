"""Proofs for small problems: whether there is a schedule of some extra time.

The answer is exact, from a search over states, and takes fewer of them the less time is
allowed. So it is asked for none at all first, and then for more and more; what there is
no schedule for is a bound. A dive in between looks where most has run, not where the
bound is least: it finds schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from geutil.gradients.planner.problem import Problem
from geutil.gradients.planner.state_space import (
    UPPER,
    bound_of,
    expand,
    found_runs,
    is_done,
    new_space,
)

_ROOM = 800_000
"""For as many states there is room at once: 150 MB."""
_SLICE = 500
"""After how many states the clock is looked at."""
_FIRST = 1e-3
"""The first extra time that is tried above 0, as a share of the time of all nodes."""
_GROWTHS = ((0.02, 3.0), (0.1, 1.7), (math.inf, 1.5))
"""How much more is tried next, by the share of all that may be spent on what was."""
_NEARLY = 0.9
"""Above this part of what is known, all that is better is allowed."""
_ANY = 4.0
"""Above so many times the time of all nodes, any extra time is allowed."""
_PARTS = 0.25
"""The share of states and of time for no extra time at all, and for a dive."""
_PULL_DOWN = 0.3
"""How much a node that has run is worth in a dive, in the mean time of a node."""
_CLOSE = 2e-10
"""Times that are no whole numbers are as good as equal within this share of all."""


def prove(
    problem: Problem,
    order: Sequence[int] | None,
    budget: float,
    upper: float,
    spent: Callable[[], float],
    most: int | None = None,
) -> tuple[float, list[int] | None]:
    """Return a bound on the extra time of every schedule, and runs that are better.

    Whether there is a schedule is asked for little extra time first, and then for more
    and more: the less is allowed, the fewer states there are.

    Args:
        problem: the computation.
        order: in which nodes run for the first time; None for any.
        budget: in bytes.
        upper: extra time of a schedule that is known; infinity for none.
        spent: tells, after some states, which share of the time is over.
        most: how many states are looked at; None for as many as there is time for.

    Returns:
        The bound, which is `upper` or the time of the runs where these are proven best;
        and the runs, None if none were found that are better than `upper`.

    Cost: exponential; with `most` states, each takes the nodes and their readers for
    each run that may follow and each choice of what is freed for it.

    Example:
        >>> edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
        >>> problem = Problem([2, 1, 1, 1, 1], [8, 8, 8, 8, 0], edges)
        >>> prove(problem, None, 16, 9.0, lambda: 0.0)
        (2.0, [0, 1, 2, 3, 0, 4])
    """
    questions = _Questions(problem, order, budget, spent)
    part = max(int(_PARTS * min(most or _ROOM, _ROOM)), 1)
    asked = questions.ask(0.0, upper, part, _PARTS)
    bound, left = asked.bound, (most or math.inf) - asked.looked
    if asked.runs is not None or asked.is_last:
        return bound, asked.runs
    # A dive, which finds schedules where the rest only proves.
    dived = questions.dive(upper, part, min(spent() + _PARTS, 1.0))
    bound, left, runs = max(bound, dived.bound), left - dived.looked, dived.runs
    if dived.is_last:
        return bound, runs
    if runs is not None:
        upper = math.fsum(problem.times[v] for v in runs) - problem.total_time
    allowed = 0.0
    while asked.is_out and left > 0 and spent() < 1.0:
        share = max(asked.looked / (most or _ROOM), asked.spent)
        growth = next(growth for least, growth in _GROWTHS if share < least)
        allowed = max(growth * allowed, _FIRST * problem.total_time)
        if allowed > min(_NEARLY * upper, _ANY * problem.total_time):
            allowed = math.inf
        asked = questions.ask(allowed, upper, int(min(left, _ROOM)), 1.0)
        bound, left = max(bound, asked.bound), left - asked.looked
        runs = asked.runs or runs
        if asked.is_last:
            break
    return bound, runs


class _Asked(NamedTuple):
    """What came of the question whether there is a schedule of some extra time.

    Attributes:
        bound: extra time that every schedule takes at least.
        runs: of a schedule; None if none was found.
        looked: at how many states.
        spent: the share of the time.
        is_out: whether there is surely none.
        is_last: whether nothing more is to be asked: there is none that is better than
            what was known, or the runs are proven best.
    """

    bound: float
    runs: list[int] | None
    looked: int
    spent: float
    is_out: bool
    is_last: bool


class _Questions:
    """Asks whether a problem has schedules of some extra time; see `prove`."""

    def __init__(
        self,
        problem: Problem,
        order: Sequence[int] | None,
        budget: float,
        spent: Callable[[], float],
    ) -> None:
        self._problem, self._order, self._budget = problem, order, budget
        self._spent = spent
        self._whole = step_of(problem.times)
        self._step = self._whole or _CLOSE * max(problem.total_time, 1.0)

    def dive(self, upper: float, most: int, until: float) -> _Asked:
        """Look for a schedule that is better than one of some extra time."""
        pull = _PULL_DOWN * self._problem.total_time / max(len(self._problem), 1)
        return self.ask(math.inf, upper, most, until, pull or 1.0)

    def ask(
        self, allowed: float, upper: float, most: int, until: float, pull: float = 0.0
    ) -> _Asked:
        """Tell whether there is a schedule of some extra time and below another.

        Args:
            allowed: the extra time.
            upper: the one below which it has to be.
            most: how many states are looked at.
            until: which share of the time.
            pull: by how much a state comes earlier for each node that has run; above
                0, what waits then bounds nothing.
        """
        step, before, looked = self._step, self._spent(), 0
        useful = upper - step
        if self._whole and upper < math.inf:
            useful = (math.ceil(upper / step) - 1) * step
        if self._whole and allowed < math.inf:
            allowed = math.floor(allowed / step) * step
        allowed = min(allowed, useful)
        figures = (allowed + step, step, pull)
        space = new_space(self._problem, self._order, self._budget, figures, most)
        while looked < most and not is_done(space) and self._spent() < until:
            looked += int(expand(space, min(_SLICE, most - looked)))
        known, runs = bound_of(space), found_runs(space)
        # Sums of times that are not whole are rounded; they prove a little less.
        bound = max(known - (0.0 if self._whole else 2 * step), 0.0)
        is_out = runs is None and known >= allowed + step
        is_best = runs is not None and known >= space.figures[UPPER]
        is_last = is_best or (is_out and allowed == useful)
        return _Asked(bound, runs, looked, self._spent() - before, is_out, is_last)


def step_of(times: Sequence[float]) -> float:
    """Return what sums of times are multiples of; 0 if times are no whole numbers."""
    if not all(time.is_integer() for time in times):
        return 0.0
    return float(math.gcd(*map(int, times)) or 1)
