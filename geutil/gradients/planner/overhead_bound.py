"""A lower bound on the extra time of every schedule within a budget.

Look at the moment at which node v runs for the first time. What ran before and is read
by something that has to come later is then held, or it runs again after that moment;
and where a node runs again, each of its inputs is held at that moment or runs again,
too. All that is held at the moment fits the budget together with v, its inputs and its
workspace. One choice of nodes that run again has to do for all v at once: a mixed
integer program, with the least time of that choice as the bound. Where any order is
allowed, only ancestors of v have surely run before, and only descendants surely come
later.

It counts one extra run of a node, where a schedule may need several, and looks at no
moment but those; so it is the least for budgets at which nodes run a third time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geutil.errors import MissingExtraError
from geutil.gradients.planner.problem import Problem

_TOLERANCE = 1e-6
"""Of the solver, relative to the time of all nodes."""
_LARGEST = 1000
"""Variables of a program. With four times as many the bounds of six networks, at half
and at a quarter, were higher by 0.1 % of the step at most, and took three times as
long."""


def extra_time_bound(
    problem: Problem,
    budget: float,
    order: Sequence[int] | None = None,
    time_limit: float = 10.0,
    branches: int | None = None,
) -> float:
    """Return extra time that every schedule within a budget takes at least.

    Args:
        problem: the computation.
        budget: in bytes.
        order: in which nodes run for the first time; None for any.
        time_limit: in seconds; what the solver knows by then is returned.
        branches: a limit of branches in place of that of time, so that the result does
            not depend on how fast the machine is.

    Returns:
        The bound; infinity if no schedule keeps the budget.

    Raises:
        MissingExtraError: OR-Tools is not installed.

    Cost: nodes times their ancestors, and the solver's.

    Example:
        The first node is read by the last one; it is freed in between or all three are
        held:

        >>> problem = Problem([2, 1, 1, 1], [8] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
        >>> extra_time_bound(problem, 24), extra_time_bound(problem, 16)
        (0.0, inf)
        >>> edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
        >>> extra_time_bound(Problem([2, 1, 1, 1, 1], [8, 8, 8, 8, 0], edges), 16)
        2.0
    """
    if budget < problem.least_budget:
        return math.inf
    needed = _needed(problem, order)
    to_run = np.array([problem.bytes_to_run(node) for node in range(len(problem))])
    excess = to_run + needed @ np.array(problem.sizes, np.int64) - budget
    program = _Program(problem, budget)
    # The fullest first: a program of all of them may be too large to be solved.
    for node in np.argsort(-excess, kind="stable").tolist():
        if excess[node] <= 0 or program.solver.NumVariables() > _LARGEST:
            break
        program.add(node, np.nonzero(needed[node])[0].tolist())
    return program.least_time(time_limit, branches)


def _needed(problem: Problem, order: Sequence[int] | None) -> npt.NDArray[np.bool_]:
    """Return what is read after the first run of each node, and ran before it.

    A row for each node; what it reads itself is left out.
    """
    count = len(problem)
    before = np.zeros((count, count), np.bool_)
    if order is not None:
        place = np.empty(count, np.int64)
        place[list(order)] = range(count)
        before = place < place[:, None]
    else:
        for node in problem.topological_order:
            for u in problem.inputs[node]:
                before[node] |= before[u]
                before[node, u] = True
    # For each node the others behind which something reads it.
    read_later = np.zeros_like(before)
    for node, readers in enumerate(problem.readers):
        for reader in readers:
            read_later[node] |= before[reader]
    read_later[[*problem.outputs, *problem.keep]] = True
    needed = before & read_later.T
    for node, inputs in enumerate(problem.inputs):
        needed[node, list(inputs)] = False
    return needed


class _Program:
    """The mixed integer program, moment by moment."""

    def __init__(self, problem: Problem, budget: float) -> None:
        self._problem, self._budget = problem, budget
        self._once = {*problem.no_recompute, *problem.keep}
        self.solver = _new_solver()
        self._again: dict[int, Any] = {}

    def add(self, node: int, needed: Sequence[int]) -> None:
        """Add the first run of a node: what is held then, and what runs again later."""
        problem, solver = self._problem, self.solver
        at_work = {node, *problem.inputs[node]}
        room = self._budget - problem.bytes_to_run(node)
        # The needed nodes first; then the inputs of those that may run again. Nodes
        # that run once are not made again, so their inputs need not be there.
        waiting = dict.fromkeys(needed)
        for u in (queue := list(needed)):
            inputs = () if u in self._once else problem.inputs[u]
            more = [w for w in inputs if w not in waiting and w not in at_work]
            waiting |= dict.fromkeys(more)
            queue += more
        held = {u: solver.BoolVar("") for u in waiting}
        later = {u: solver.BoolVar("") for u in waiting if u not in self._once}
        for u in needed:
            solver.Add(held[u] + later.get(u, 0) >= 1)
        for u, runs_later in later.items():
            if u not in self._again:
                self._again[u] = solver.BoolVar("")
            solver.Add(runs_later <= self._again[u])
            for w in problem.inputs[u]:
                if w not in at_work:
                    solver.Add(held[w] + later.get(w, 0) >= runs_later)
        # Divided by the budget, since bytes are too large for a solver's tolerances.
        scale = max(self._budget, 1.0)
        sizes = problem.sizes
        solver.Add(sum(held[u] * (sizes[u] / scale) for u in held) <= room / scale)

    def least_time(self, time_limit: float, branches: int | None) -> float:
        """Return the least time of the nodes that run again."""
        if not self._again and not self.solver.NumConstraints():
            return 0.0
        times, total = self._problem.times, self._problem.total_time or 1.0
        extra = sum(again * (times[u] / total) for u, again in self._again.items())
        self.solver.Minimize(extra)
        if branches is None:
            self.solver.SetTimeLimit(max(int(1000 * time_limit), 1))
        else:
            limit = f"limits/nodes = {branches}"
            self.solver.SetSolverSpecificParametersAsString(limit)
        if self.solver.Solve() == self.solver.INFEASIBLE:
            return math.inf
        bound = max(self.solver.Objective().BestBound(), 0.0)
        return _rounded_up(max(bound - _TOLERANCE, 0.0) * total, times)


def _rounded_up(bound: float, times: Sequence[float]) -> float:
    """Return the next sum of times, where all of them are whole numbers."""
    if not all(time.is_integer() for time in times):
        return bound
    step = math.gcd(*map(int, times)) or 1
    return float(-(-bound // step) * step)


def _new_solver() -> Any:
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise MissingExtraError(
            "plans under a budget are bounded by OR-Tools, which is not installed; "
            "run: pip install 'geutil[plan]'"
        ) from error
    return pywraplp.Solver.CreateSolver("SCIP")
