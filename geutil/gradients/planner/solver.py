"""Solving: the least extra time in a budget and its bound, the least peak in a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import count, islice, product, repeat
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from geutil.errors import ArgumentTypeError, MissingExtraError, PlanError
from geutil.gradients.planner.problem import Improvement, Problem, Schedule, Status

Objective = Literal["time", "peak"]
Progress = Callable[[Improvement], None]

_HEATS = 0.3, 0.003
"""The first and the last temperature, in the mean time of a node."""
_SHIFTED, _SHIFTED_IN_STEPS = 0.85, 0.2
"""How often a move shifts a run, and then one more: the order of a step is good. The
mean extra time of 12 random layered problems is 0.86 % at 0.85, 0.92 % at 0.7."""
_MOVES_A_NODE = 160
"""Moves of searches from many starts, where time is the limit. With 40, 160 and 640 the
mean extra time of four random problems at 0.6 of their peak, after 3 s, is 16.6, 16.8
and 17.0 % (testdata.layered, 100 to 500 nodes)."""
_CYCLES = 2
"""How often searches start hot again."""
_WORTH = 10
"""The weight of a move in `iterations`."""
_SLICES, _FIRST_SLICE = 50, 30
"""How often a search looks at the clock, and the moves before it does so first."""
_CLOSE, _PROGRAM_CLOSE = 1e-9, 2e-6
"""Extra time that does not count, and that by which the program's bound may be low, as
shares of the time of all nodes."""


def solve(
    problem: Problem,
    budget: float,
    *,
    objective: Objective = "time",
    time_limit: float = 30.0,
    seed: int = 0,
    reorder: bool = True,
    workers: int | None = None,
    iterations: int | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """Return a schedule within a budget, with the least extra time that is found.

    From orders of low peak, nodes are freed and recomputed until the budget is met, in
    several ways; then local searches lower the time of the best, until it meets the
    lower bound or their time is up.

    Args:
        problem: the computation.
        budget: in bytes; with `objective="peak"` the most extra time.
        objective: "time" for the least extra time within a budget, "peak" for the
            least peak within extra time.
        time_limit: in seconds. The first call ever compiles for about 8 s besides.
        seed: the seed of the random numbers.
        reorder: whether nodes may run for the first time in another order than the
            problem's. A fixed order always stays.
        workers: the number of concurrent searches; by default one for each core.
        iterations: the number of moves of each search, instead of as many as the time
            allows; with it, results do not depend on the speed of the machine. A move
            that removes several runs and frees again counts for ten.
        progress: called with each improvement.

    Returns:
        The best schedule. Its `status` says whether it is proven.

    Raises:
        ArgumentTypeError: an unknown objective.
        MissingExtraError: numba or OR-Tools is not installed.

    Cost: `time_limit`, unless the lower bound is met earlier.

    Example:
        >>> edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
        >>> problem = Problem([1] * 5, [8] * 5, edges, outputs=[4])
        >>> schedule = solve(problem, 24, iterations=2000, workers=1)
        >>> schedule.status, schedule.peak, schedule.overhead
        ('optimal', 24, 0.0)
        >>> solve(problem, 16, iterations=2000, workers=1).status
        'infeasible'
    """
    if objective not in ("time", "peak"):
        raise ArgumentTypeError(f"objective is 'time' or 'peak', not {objective!r}")
    workers = workers or os.cpu_count() or 1
    options = _SolveOptions(time_limit, seed, reorder, workers, iterations, progress)
    if objective == "peak":
        return _least_peak(problem, budget, options)
    return _Solver(problem, budget, options).solve()


def schedule_step(
    problem: Problem,
    limit: float,
    moves: int,
    *,
    objective: Objective = "time",
    seed: int = 0,
    found: Sequence[Sequence[int]] = (),
) -> Schedule:
    """Return a schedule of a step, whose own order is good, without a bound."""
    # `limit` is the `budget` of `solve`, `moves` its `iterations`, and the search
    # begins with the runs `found` in the place of orders.
    workers = os.cpu_count() or 1
    options = _SolveOptions(math.inf, seed, True, workers, moves, None, is_step=True)
    if objective == "peak":
        return _least_peak(problem, limit, options)
    return _Solver(problem, limit, options).solve(found)


@dataclass(frozen=True)
class _SolveOptions:
    """How to solve; see `solve`."""

    time_limit: float
    seed: int
    reorder: bool
    workers: int
    iterations: int | None
    progress: Progress | None
    is_step: bool = False


class _Solver:
    """Searches of several seeds for less extra time than `goal` within a budget."""

    def __init__(
        self, problem: Problem, budget: float, options: _SolveOptions, goal: float = 0.0
    ) -> None:
        self._problem, self._budget, self._options = problem, budget, options
        self._goal, self._bound = goal, 0.0
        self._best: Schedule | None = None
        self._least: Schedule | None = None
        self._history: list[Improvement] = []
        self._kernels: Any = None
        self._began = monotonic()

    def solve(self, found: Sequence[Sequence[int]] = ()) -> Schedule:
        """Return the best schedule, from some runs on and from orders of low peak."""
        problem, options = self._problem, self._options
        starts = [*found]
        # The order of a step is good: with `found`, no other is tried.
        if not (found and options.is_step):
            starts += _orders(problem, options.reorder)
        self._consider(starts[0])
        if not self._is_done() and self._budget >= problem.least_budget:
            self._search(starts)
        found_best = self._best or self._least
        status: Status = "infeasible"
        if self._best is not None:
            status = "optimal" if self._is_within(_CLOSE) else "feasible"
        elif self._budget < problem.least_budget:
            # No schedule at all can hold less than the least budget.
            self._bound = math.inf
        return Schedule(
            problem,
            found_best.runs if found_best else (),
            budget=self._budget,
            lower_bound=self._bound,
            status=status,
            history=tuple(self._history),
        )

    def _search(self, starts: Sequence[Sequence[int]]) -> None:
        """Look for less extra time until none is proven less, or time is up."""
        problem, options = self._problem, self._options
        began = monotonic()
        self._kernels = _kernels()
        # The seconds of compiling do not count.
        self._began += monotonic() - began
        fixed = problem.fixed_order is not None or not options.reorder
        order = problem.first_order if fixed else None
        self._arrays = self._kernels.arrays_of(problem, order)
        self._rebuild_from_many(starts)
        if options.is_step:
            return
        self._find_bound(order)
        for turn in range(_CYCLES):
            # Of the moves all turns have the same part, of the time that of the rest.
            done = turn if options.iterations is None else 0
            self._rebuild_best(1 / (_CYCLES - done))

    @property
    def _seconds_left(self) -> float:
        return self._options.time_limit - (monotonic() - self._began)

    def _is_done(self) -> bool:
        """Return whether nothing worth looking for is left to gain."""
        # A program's bound is a little low, and more than that is not to be gained.
        return self._is_within(_PROGRAM_CLOSE if self._bound else _CLOSE)

    def _is_within(self, share: float) -> bool:
        """Return whether the best is nearly as good as can be."""
        if self._best is None:
            return self._bound == math.inf
        close = share * max(self._problem.total_time, 1.0)
        return self._best.overhead <= max(self._bound, self._goal) + close

    def _consider(self, runs: Sequence[int]) -> None:
        """Take a sequence of runs over if it is better."""
        found, best = Schedule(self._problem, tuple(runs)), self._best
        # Cheap to tell, unlike the peak: a search is asked again after every slice.
        if best is not None and found.overhead >= best.overhead:
            return
        if self._least is None or found.peak < self._least.peak:
            self._least = found
        if found.peak <= self._budget:
            self._best = found
            seconds = monotonic() - self._began
            self._history.append(Improvement(seconds, found.overhead, found.peak))
            if self._options.progress is not None:
                self._options.progress(self._history[-1])

    def _find_bound(self, order: tuple[int, ...] | None) -> None:
        """Bound the extra time of every schedule by a program."""
        moves = self._options.iterations
        # To write the program of a larger problem down would take too long.
        is_hurried = moves is not None and moves < 200_000
        most = 400 if is_hurried else 2000
        if not self._is_done() and len(self._problem) <= most:
            # A deterministic search must not depend on the clock.
            branches = None if moves is None else 200
            limit = self._seconds_left * 0.25
            self._bound = extra_time_bound(
                self._problem, self._budget, order, limit, branches
            )

    def _new_search(self, runs: Sequence[int], number: int) -> Any:
        seed = self._options.seed + number
        return self._kernels.new_search(self._arrays, runs, self._budget, seed)

    def _rebuild(self, search: Any, heats: Sequence[float], moves: int) -> None:
        total = self._problem.total_time
        shifted = _SHIFTED_IN_STEPS if self._options.is_step else _SHIFTED
        goal = max(self._bound, self._goal) + total * (1 + _CLOSE)
        hot, cold = np.array(heats) / max(len(self._problem), 1)
        self._kernels.rebuild(search, shifted, hot, cold, max(moves, 1), goal)

    def _consider_all(self, searches: Iterable[Any]) -> None:
        """Take over the results of searches, or, above the budget, where they stand."""
        for search in searches:
            self._consider(search.best_runs or search.runs)

    def _rebuild_from_many(self, starts: Sequence[Sequence[int]]) -> None:
        """Rebuild from many evictions of some starts, and go on with the best."""
        # Successive halving (Jamieson and Talwalkar 2016): a short rebuilding tells
        # where a long one from the same start leads.
        kernels, nodes = self._kernels, len(self._problem)
        # How much is left to chance: each led to the best schedule of some of 21 steps.
        noises = (0.0, 1.0, 2.0, 3.0)
        ways = product(noises, kernels.WAYS, dict.fromkeys(map(tuple, starts)))
        moves = self._options.iterations or nodes * _MOVES_A_NODE

        def begin(number: int, job: tuple[float, int, Sequence[int]]) -> Any:
            noise, way, runs = job
            search = self._new_search(runs, number)
            kernels.evict(search, 8 * nodes, noise, way)
            return search

        def go_on(search: Any, share: float) -> None:
            if (runs := search.best_runs) is not None:
                kernels.restart(search, np.array(runs))
            self._rebuild(search, _HEATS, int(moves * share) // _WORTH)

        with ThreadPoolExecutor(self._options.workers) as pool:
            searches = list(pool.map(begin, count(), islice(ways, 16)))
            self._consider_all(searches)
            # How many go on, each for which share of the moves.
            for kept, share in ((16, 0.02), (5, 0.05), (2, 0.12)):
                if self._is_done() or self._seconds_left < 0:
                    break
                searches = sorted(searches, key=lambda search: search.rank)[:kept]
                list(pool.map(go_on, searches, repeat(share)))
                self._consider_all(searches)

    def _rebuild_best(self, share: float) -> None:
        """Rebuild the best slice by slice, for a share of the moves, or of the time."""
        # Without a number of moves, a slice is as long as the clock says, and so is how
        # far the search is: a machine that does other things cools down as well.
        options = self._options
        runs = self._problem.first_order if self._best is None else self._best.runs
        searches = [self._new_search(runs, number) for number in range(options.workers)]
        seconds, began = self._seconds_left * share, monotonic()
        moves, (hot, cold) = _FIRST_SLICE, _HEATS
        if options.iterations is not None:
            moves = int(options.iterations * share) // _WORTH // _SLICES
        done, slices = 0.0, 0
        with ThreadPoolExecutor(options.workers) as pool:
            while done < 1.0 and not self._is_done():
                parts = done, min(done + 1 / _SLICES, 1.0)
                heats = [hot * (cold / hot) ** part for part in parts]
                list(pool.map(self._rebuild, searches, repeat(heats), repeat(moves)))
                self._consider_all(searches)
                slices, before = slices + 1, done
                done = slices / _SLICES
                if options.iterations is None:
                    done = (monotonic() - began) / max(seconds, 1e-6)
                    moves = int(moves / _SLICES / max(done - before, 1e-6)) + 1


def _least_peak(problem: Problem, extra: float, options: _SolveOptions) -> Schedule:
    """Return the schedule of the least peak that is found within extra time."""
    began = monotonic()
    found = Schedule(problem, _orders(problem, options.reorder)[0])
    history: list[Improvement] = []
    steps = [0.9, 0.97, 0.99]
    while steps and found.peak > problem.least_budget:
        target = max(math.ceil(found.peak * steps[0]) - 1, problem.least_budget)
        left = options.time_limit - (monotonic() - began)
        if left <= 0 and options.iterations is None:
            break
        # A third of the rest, since a try that fails takes all it gets.
        tried = replace(options, time_limit=left / 3, progress=None)
        then = _Solver(problem, target, tried, extra).solve([found.runs])
        if then.status == "infeasible" or then.overhead > extra:
            del steps[0]
            continue
        found = Schedule(problem, then.runs)
        seconds = monotonic() - began
        history.append(Improvement(seconds, found.overhead, found.peak))
        if options.progress is not None:
            options.progress(history[-1])
    status: Status = "optimal" if found.peak <= problem.least_budget else "feasible"
    return Schedule(
        problem, found.runs, budget=extra, status=status, history=tuple(history)
    )


def _orders(problem: Problem, reorder: bool = True) -> list[tuple[int, ...]]:
    """Return orders that run every node once, that of least peak first."""
    # Unless the order is fixed, one runs the ready node that adds the least (its output
    # less the inputs it is the last to read), of equals the newest.
    if problem.fixed_order is not None or not reorder:
        return [problem.first_order]
    waits = [len(inputs) for inputs in problem.inputs]
    uses = [len(readers) for readers in problem.readers]
    staying = problem.staying
    ready: list[tuple[int, int, int]] = []
    number = count()

    def offer(node: int) -> None:
        last_read = {u for u in problem.inputs[node] if uses[u] == 1} - staying
        added = problem.sizes[node] - sum(problem.sizes[u] for u in last_read)
        heappush(ready, (added, -next(number), node))

    for node, inputs in enumerate(problem.inputs):
        if not inputs:
            offer(node)
    # A dictionary for its order.
    ran: dict[int, None] = {}
    while ready:
        node = heappop(ready)[-1]
        if node in ran:
            continue
        ran[node] = None
        for u in problem.inputs[node]:
            uses[u] -= 1
            if uses[u] == 1:
                # Its last reader frees it now, so it moves ahead.
                for reader in problem.readers[u]:
                    if reader not in ran and not waits[reader]:
                        offer(reader)
        for reader in problem.readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                offer(reader)
    return sorted([problem.first_order, tuple(ran)], key=problem.peak)


class CurvePoint(NamedTuple):
    """A point of a curve: a budget in bytes, and the best schedule within it."""

    budget: int
    schedule: Schedule


@dataclass(frozen=True)
class Curve:
    """The trade-off of memory and time.

    Attributes:
        problem: the computation.
        points: the points, from the largest budget to the smallest.
    """

    problem: Problem
    points: tuple[CurvePoint, ...]

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Plot extra time against peaks, with the lower bound of the time.

        Args:
            path: a file, with suffix .png, .svg or .pdf.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix names no format.
        """
        # Its package imports TensorFlow.
        from geutil.memory.timeline import drawn_axes

        total = self.problem.total_time or 1.0
        met = [p.schedule for p in self.points if p.schedule.status != "infeasible"]
        with drawn_axes(path, "peak, bytes", "extra time, %") as axes:
            peaks = [schedule.peak for schedule in met]
            extra = [100 * schedule.overhead / total for schedule in met]
            axes.plot(peaks, extra, "o-", label="found")
            budgets = [schedule.budget for schedule in met]
            bounds = [100 * schedule.lower_bound / total for schedule in met]
            axes.step(budgets, bounds, where="post", label="no schedule is below")
            axes.axvline(self.problem.least_budget, linestyle=":", label="least budget")
            axes.legend(frameon=False)
        return Path(path)


def pareto(
    problem: Problem, points: int | Sequence[float] = 8, **options: Any
) -> Curve:
    """Return the least extra time for several budgets.

    Args:
        problem: the computation.
        points: the number of budgets, spread between the least peak without
            recomputation and the least budget; or the budgets themselves.
        options: those of `solve`; `time_limit` is for each budget.

    Raises:
        PlanError: there are no points.

    Example:
        >>> edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
        >>> problem = Problem([1] * 5, [8] * 5, edges, outputs=[4])
        >>> curve = pareto(problem, [32, 24], iterations=1000, workers=1)
        >>> [(p.schedule.peak, p.schedule.overhead) for p in curve.points]
        [(24, 0.0), (24, 0.0)]
    """
    if isinstance(points, int):
        most, steps = problem.peak(_orders(problem)[0]), max(points - 1, 1)
        spread = most - problem.least_budget
        budgets = [most - spread * i // steps for i in range(points)]
    else:
        budgets = sorted((int(point) for point in points), reverse=True)
    if not budgets:
        raise PlanError("a curve needs a budget; pass how many, or a list of them")
    # Where peaks are close together, budgets coincide.
    budgets = list(dict.fromkeys(budgets))
    found = (
        CurvePoint(budget, solve(problem, budget, **options)) for budget in budgets
    )
    return Curve(problem, tuple(found))


@cache
def _kernels() -> Any:
    """Return the module `sequence_search`, compiled."""
    try:
        from geutil.gradients.planner import sequence_search
    except ImportError as error:
        raise MissingExtraError(
            "plans under a budget are searched for by numba, which is not installed; "
            "run: pip install 'geutil[plan]'"
        ) from error
    problem = Problem([1, 1, 1], [1, 1, 1], [(0, 1), (1, 2), (0, 2)])
    arrays = sequence_search.arrays_of(problem, None)
    search = sequence_search.new_search(arrays, [0, 1, 2], 2.0, 0)
    sequence_search.evict(search, 1, 0.0, sequence_search.DEEP)
    sequence_search.rebuild(search, _SHIFTED, 1.0, 0.1, 1, 3.0)
    return sequence_search


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
    """Return a lower bound of extra time; infinity if no schedule is within."""
    # At the first run of node v, a result made before and read later is held, or it
    # runs again after that; and where a node runs again, each of its inputs is held
    # then or runs again, too. All that is held fits the budget together with v, its
    # inputs and its workspace. One choice of nodes that run again has to do for all v:
    # a mixed integer program. `branches` limits it in place of seconds, whatever the
    # machine.
    # Where any order is allowed, only ancestors of v have surely run before, and only
    # descendants surely come later. The program counts one extra run of a node, where a
    # schedule may need several, and looks at no moment but those: so it is a bound.
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
    """Return for each node the nodes run before its first run and read after."""
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
    read_later[list(problem.staying)] = True
    needed = before & read_later.T
    for node, inputs in enumerate(problem.inputs):
        needed[node, list(inputs)] = False
    return needed


class _Program:
    """The mixed integer program, moment by moment."""

    def __init__(self, problem: Problem, budget: float) -> None:
        try:
            from ortools.linear_solver import pywraplp
        except ImportError as error:
            raise MissingExtraError(
                "plans under a budget are bounded by OR-Tools, which is not installed; "
                "run: pip install 'geutil[plan]'"
            ) from error
        self._problem, self._budget = problem, budget
        self._once = problem.once
        self.solver = pywraplp.Solver.CreateSolver("SCIP")
        self._again: dict[int, Any] = {}

    def add(self, node: int, needed: Sequence[int]) -> None:
        """Add the first run of a node: results held, and nodes that run again."""
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
        least = self.solver.Objective().BestBound() - 1e-6
        bound = float(max(least, 0.0) * total)
        if not all(time.is_integer() for time in times):
            return bound
        # The next sum of times, where all of them are whole numbers.
        step = math.gcd(*map(int, times)) or 1
        return float(-(-bound // step) * step)
