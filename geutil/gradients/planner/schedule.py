"""Schedules: which node runs when, what is freed when, what that holds and costs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from geutil.errors import PlanError
from geutil.gradients.planner.problem import Problem

Status = Literal["optimal", "feasible", "infeasible"]


class ScheduleStep(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: "compute", or "free" for what a node made.
        node: the number of the node.
    """

    kind: Literal["compute", "free"]
    node: int


class Improvement(NamedTuple):
    """A schedule that was the best when it was found.

    Attributes:
        seconds: since solving began.
        overhead: its extra time.
        peak: its peak, in bytes.
    """

    seconds: float
    overhead: float
    peak: int


@dataclass(frozen=True)
class Schedule:
    """Runs of nodes, some of them several times, and what is known of them.

    Attributes:
        problem: the computation.
        runs: the nodes in the order in which they run.
        budget: the bytes that were given, or extra time where the peak is lowered.
        lower_bound: no schedule within the budget has less extra time; infinity where
            no schedule keeps it.
        status: "optimal": no schedule does better; "feasible": this one keeps the
            budget; "infeasible": it does not. Then this one has the least peak that
            was found.
        history: the improvements, in order.

    Example:
        >>> edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4)]
        >>> problem = Problem([1] * 5, [8] * 5, edges, outputs=[4])
        >>> schedule = Schedule(problem, (0, 1, 2, 3, 0, 4))
        >>> schedule.verify()
        >>> schedule.peak, schedule.time, schedule.overhead
        (24, 6.0, 1.0)
        >>> schedule.steps[:3]
        (ScheduleStep(kind='compute', node=0), ScheduleStep(kind='compute', node=1),
         ScheduleStep(kind='free', node=0))
    """

    problem: Problem
    runs: tuple[int, ...]
    budget: float = math.inf
    lower_bound: float = 0.0
    status: Status = "feasible"
    history: tuple[Improvement, ...] = ()

    def __str__(self) -> str:
        share = 100 * self.overhead / (self.problem.total_time or 1)
        said = (
            f"{self.status}: peak {self.peak} bytes, {len(self.runs)} runs of "
            f"{len(self.problem)} nodes, {share:.2f} % more time"
        )
        if self.status == "infeasible":
            known = "exists" if self.lower_bound == math.inf else "was found"
            least = self.problem.least_budget
            return (
                f"{said}; no schedule within {self.budget:g} bytes {known}; the least "
                f"peak found is {self.peak}, and none is below {least}"
            )
        return f"{said}, at most {100 * self.gap:.2f} % from the best"

    @cached_property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """What is computed and freed: everything behind its last use."""
        freed: list[list[int]] = [[] for _ in (*self.runs, None)]
        last_uses = self.problem.last_uses(self.runs)
        for node, last in zip(self.runs, last_uses, strict=True):
            freed[last].append(node)
        steps: list[ScheduleStep] = []
        for node, behind in zip(self.runs, freed, strict=False):
            steps.append(ScheduleStep("compute", node))
            steps += [ScheduleStep("free", v) for v in sorted(behind)]
        return tuple(steps)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The bytes that are held during each run."""
        return self.problem.held(self.runs)

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return max(self.held, default=0)

    @property
    def time(self) -> float:
        """The time of all runs."""
        return math.fsum(self.problem.times[node] for node in self.runs)

    @property
    def overhead(self) -> float:
        """The time above that of running every node once."""
        return max(self.time - self.problem.total_time, 0.0)

    @property
    def gap(self) -> float:
        """What may be saved at most, as a share of the time of every node once."""
        missing = max(self.overhead - self.lower_bound, 0.0)
        return missing / self.problem.total_time if missing else 0.0

    def verify(self) -> None:
        """Go through the steps one by one, as a machine would.

        Raises:
            PlanError: a node runs without an input, or again although it may not, an
                output is missing at the end, a node never runs, the order or the
                budget is not kept, or a figure is not what the steps say.

        Cost: linear in the steps and their inputs.
        """
        problem = self.problem
        there: set[int] = set()
        ran: dict[int, int] = {}
        held = peak = 0
        once = {*problem.no_recompute, *problem.keep}
        for number, (kind, node) in enumerate(self.steps):
            where = f"step {number} ({kind} {node})"
            if kind == "free":
                if node not in there:
                    raise PlanError(f"{where}: it is not there")
                if node in problem.keep:
                    raise PlanError(f"{where}: it has to be kept")
                there.remove(node)
                held -= problem.sizes[node]
                continue
            if node in ran and node in once:
                raise PlanError(f"{where}: it may run only once")
            if node in there:
                raise PlanError(f"{where}: its output is there already")
            if missing := [u for u in problem.inputs[node] if u not in there]:
                raise PlanError(f"{where}: its inputs {missing} are not there")
            there.add(node)
            ran[node] = ran.get(node, 0) + 1
            held += problem.sizes[node]
            peak = max(peak, held + problem.workspaces[node])
        self._check_end(there, ran, peak)

    def _check_end(self, there: set[int], ran: dict[int, int], peak: int) -> None:
        """Compare what the steps came to with what was promised."""
        problem = self.problem
        if never := [v for v in range(len(problem)) if v not in ran]:
            raise PlanError(f"nodes {never[:5]} never run")
        if lost := sorted({*problem.outputs, *problem.keep} - there):
            raise PlanError(f"the outputs of nodes {lost[:5]} are not there at the end")
        if problem.fixed_order not in (None, tuple(ran)):
            raise PlanError("nodes first run in another order than fixed_order")
        time = math.fsum(problem.times[v] * count for v, count in ran.items())
        if peak != self.peak or not math.isclose(time, self.time, abs_tol=1e-9):
            raise PlanError(
                f"peak and time are {peak} and {time}, not {self.peak} and {self.time}"
            )

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw what is held during each run, and the budget.

        Args:
            path: a file, with suffix .png, .svg or .pdf.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix names no format.
        """
        # Its package imports TensorFlow.
        from geutil.memory.timeline import drawn_axes

        count = len(self.runs)
        first = dict(zip(self.runs[::-1], range(count)[::-1], strict=True))
        again = [i for i, node in enumerate(self.runs) if first[node] != i]
        with drawn_axes(path, "runs in order", "held, bytes") as axes:
            places = range(len(self.held) + 1)
            levels = [*self.held, *(self.held[-1:] or [0])]
            axes.step(places, levels, where="post", linewidth=1.2)
            dots = [self.held[i] for i in again]
            axes.plot(again, dots, "|", label="computed again")
            if self.status != "infeasible" and math.isfinite(self.budget):
                axes.axhline(self.budget, linestyle="--", label="budget")
            axes.legend(frameon=False)
        return Path(path)
