"""The least recomputation whose predicted peak is within a budget.

The planner schedules the step, and may run forward ops again as often as it saves. A
simulation of the whole step evaluates a schedule, since kernels hold more than their
results, and reuse buffers. So the planner is run for several budgets, until the
simulated peak is just within the given one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients.barriers import HOST
from geutil.gradients.planner.problem import Schedule
from geutil.gradients.planner.solver import extra_time_bound, schedule_step
from geutil.gradients.planning.least_peak import (
    AS_GOOD,
    Trial,
    Trials,
    choose_for_memory,
)
from geutil.gradients.planning.step_problem import (
    StepProblem,
    step_problem,
    travel_times,
    with_transfers,
)
from geutil.gradients.prediction import Updates, program_of
from geutil.gradients.segments import Keeps, Recomputation
from geutil.gradients.step import PlainStep
from geutil.graph.runtime import kind_of, planned_for
from geutil.graph.types import Tensor
from geutil.memory.costs import tensor_bytes
from geutil.memory.read import device_of
from geutil.sizes import byte_count, size_text

_MOVES_A_NODE, _FEW_MOVES, _MOVES_TIMES_NODES = 960, 160_000, 270_000_000
"""Moves of a search for each node of the problem; at most the second, or as many as
times the nodes are the third. Small problems need more: U-Net at a quarter takes 36.8 %
more time with 160,000, 34.8 % with 480,000 (means of three seeds)."""
_AIM, _MOST = 0.985, 0.99
"""Parts of a budget that are aimed at and accepted: a finished step may hold a percent
more than was planned."""
_SPARE_OF_REGION, _SPARE_OF_REGIONS = 1 / 16, 1 / 8
"""The part of a budget that stays free where an allocator hands out chunks, of one
region and of growing memory: the order that a step has in the end moves the gaps
between them. Encoder and ResNet50, 50 % and 25 %: chunks of 0.98 to 1.08 times, and of
0.98 to 1.15 times the plan."""
_CLOSE = 0.01
"""As a part of the budget: peaks nearer to it make no difference."""


@dataclass(frozen=True)
class Budget:
    """The limit of a step's peak memory, or of its extra time.

    Attributes:
        limit: bytes; a text such as "1.5GB", "800 MiB" or "50%"; or a fraction of the
            peak of plain gradients, above 0 and up to 1. The planner minimizes the
            extra time within this limit.
        seed: the seed of the planner's random numbers.
        measured: whether to time each kind of op on this machine (some seconds);
            otherwise times are estimated from shapes.
        offload: whether results may also wait in the memory of another device, where
            that takes less time than recomputing them. Ops are then timed, and
            transfers are counted as if no op ran meanwhile, so they may take less. The
            peak is that of the step's own device.
        bandwidth: transfer rate in bytes per second, each way; None measures it.
        offload_device: that device.
        extra_time: instead of a limit, the time of ops that run again, as a fraction of
            the time of the step with plain gradients, or as a text such as "20%". The
            planner minimizes the peak within this time. One more forward pass is about
            0.3.

    Raises:
        ArgumentTypeError: the limit is none of these, the bandwidth or the extra time
            is not positive, or not exactly one of limit and extra time is given.

    Example:
        >>> Budget("1.5GB").bytes(10**10), Budget(0.5).bytes(400), Budget(64).bytes(1)
        (1500000000, 200, 64)
        >>> print(Budget(extra_time=0.2))
        least peak in 20 % more time
    """

    limit: int | float | str | None = None
    seed: int = 0
    measured: bool = False
    offload: bool = False
    bandwidth: float | None = None
    offload_device: str = HOST
    extra_time: float | str | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no budget."""
        if (self.limit is None) == (self.extra_time is None):
            raise ArgumentTypeError(
                "a budget has either a limit, such as '1.5GB' or '50%', or extra_time, "
                "such as 0.2"
            )
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise ArgumentTypeError(
                "bandwidth is a positive number of bytes in a second, got "
                f"{self.bandwidth!r}"
            )
        if self.extra_time is not None:
            if self.extra_share is None:
                raise ArgumentTypeError(
                    "extra_time is a positive number, a part of the time of the step, "
                    f"or a text such as '20%', got {self.extra_time!r}"
                )
        elif self._share is None and byte_count(self.limit) is None:
            raise ArgumentTypeError(
                "a budget is a number of bytes, a text such as '1.5GB' or '50%', or a "
                f"part of plain gradients' peak up to 1.0, got {self.limit!r}"
            )

    def __str__(self) -> str:
        if self.extra_share is not None:
            return f"least peak in {100 * self.extra_share:g} % more time"
        if self._share is not None:
            return f"budget of {100 * self._share:g} % of plain gradients"
        return f"budget of {size_text(self.bytes(0))}"

    def bytes(self, plain_peak: int) -> int:
        """Return the budget in bytes; for one of time, the peak of plain gradients.

        Args:
            plain_peak: the peak of plain gradients.
        """
        if self.extra_time is not None:
            return plain_peak
        if self._share is not None:
            return int(self._share * plain_peak)
        return byte_count(self.limit) or 0

    @property
    def extra_share(self) -> float | None:
        """The extra time as a fraction of the step's time; None if there is a limit."""
        share = _share_of(self.extra_time)
        return share if share is not None and 0 < share < math.inf else None

    @property
    def _share(self) -> float | None:
        """The part of plain gradients, if the limit is one."""
        is_share = isinstance(self.limit, float | str)
        share = _share_of(self.limit) if is_share else None
        return share if share is not None and 0 < share <= 1 else None


def _share_of(value: object) -> float | None:
    """Return a number, or a text in percent, as a share; None for anything else."""
    if isinstance(value, str):
        number, percent, rest = value.partition("%")
        try:
            return float(number) / 100 if percent and not rest.strip() else None
        except ValueError:
            return None
    # True is an int by isinstance, and no share.
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    return None


_ANY = Budget(1.0)


class BudgetSearch:
    """Plans one step: the least time within bytes, or the least peak within time."""

    # `others` are choices of kept tensors that are tried besides; `budget` says all but
    # how much. Where nothing is within a budget with `updates` "apart", it is looked
    # for with such in place, and then without any.

    def __init__(
        self,
        step: PlainStep,
        always: Keeps,
        others: Iterable[Sequence[Tensor]] = (),
        budget: Budget = _ANY,
        *,
        updates: Updates = "apart",
    ) -> None:
        self._step, self._always, self._others = step, always, list(others)
        self._budget, self._updates = budget, updates
        device, here = planned_for(step.graph), kind_of(None)
        if budget.measured and kind_of(device) != here:
            raise PlanError(
                f"ops are measured on the {here} of this process, and the step is "
                f"planned for '{device}': plan without measured=True"
            )
        # Transfers take seconds, so that ops have to be measured beside them.
        self.time_of = step.op_times(
            measured=budget.measured or budget.offload, in_seconds=budget.offload
        )
        self._trials = Trials(step, always, updates=updates)

    @cached_property
    def plain_peak(self) -> int:
        """The bytes that plain gradients hold, without updates."""
        return program_of(self._step).plain_peak()

    @cached_property
    def alone(self) -> Trial:
        """The trial of order alone."""
        return self._trials.without()

    @cached_property
    def _time(self) -> float:
        """How long the step takes with plain gradients."""
        return sum(map(self.time_of, self._step.ops()))

    @cached_property
    def problem(self) -> StepProblem:
        """The step as a problem of the planner."""
        return step_problem(
            self._step, self._always, self._trials.program, self.time_of
        )

    @cached_property
    def _problems(self) -> list[StepProblem]:
        """The step's problem, and some in which results may travel."""
        # Those that take longer to compute than to travel both ways, or half or twice
        # as long: ops that run again may need others to run again before them.
        problem, budget = self.problem, self._budget
        if not budget.offload:
            return [problem]
        one_way = travel_times(problem, budget.offload_device, budget.bandwidth)
        times = problem.problem.times
        choices = [
            {n: t for n, t in one_way.items() if 2 * t < worth * times[n]}
            for worth in (0.5, 1.0, 2.0)
        ]
        distinct = [c for i, c in enumerate(choices) if c and c not in choices[:i]]
        return [problem, *(with_transfers(problem, choice) for choice in distinct)]

    @cached_property
    def _with_less(self) -> BudgetSearch:
        """The same search, as if updates held less."""
        return BudgetSearch(
            self._step,
            self._always,
            self._others,
            self._budget,
            updates="in place" if self._updates == "apart" else "none",
        )

    @cached_property
    def _simple(self) -> list[Trial]:
        """Choices that need no planner: that of the least peak, and others."""
        least = self.least_once_again()
        return [self._trials.run(kept) for kept in (*self._others, least.kept) if kept]

    def least_once_again(
        self,
        min_checkpoint_size: int = 0,
        *,
        among_others: bool = False,
        returns: Callable[[Recomputation], Recomputation] | None = None,
        enough: int = 0,
    ) -> Trial:
        """Return the least peak if no op runs more than once again: "memory"."""
        # The mode "memory" leaves updates out, which the trials here may count.
        trials = self._trials if self._updates == "none" else None
        if returns:
            trials = Trials(self._step, self._always, returns=returns, enough=enough)
        return choose_for_memory(
            self._step,
            self._always,
            min_checkpoint_size,
            among_others=among_others,
            others=self._others,
            trials=trials,
        )

    def within(self, limit: int) -> Trial:
        """Return the recomputation of least time within a limit, or raise PlanError."""
        # Tried are the planner's schedules. If none of them is within the budget, so
        # are the choice of the least peak, and others, with as much kept besides as
        # fits.
        if self.alone.peak <= limit:
            return self.alone
        tried = self.tried(limit)
        if self._updates == "none" and all(trial.peak > limit for trial in tried):
            fits = [trial for trial in self._simple if trial.peak <= limit]
            tried += [self._refined(trial, limit) for trial in fits] or self._simple
        best = self._best_within(tried, limit)
        if best is None and self._updates != "none":
            return self._with_less.within(limit)
        if best is None:
            lowest = min([self.alone, *tried], key=lambda trial: trial.peak)
            raise PlanError(
                "no choice of checkpoints was found whose predicted peak is within "
                f"{size_text(limit)}; the least that was found is "
                f"{size_text(lowest.peak)}; pass a larger budget, or a smaller batch"
            )
        if self._updates == "apart" and self._leaves_more(tried[0]):
            # One schedule tells whether a budget for updates in place is worth it.
            worth = 0.75 * self._extra_time(best)
            (first,) = self._with_less.tried(limit, 1)[:1]
            if self._extra_time(first) < worth:
                other = self._with_less.within(limit)
                if self._extra_time(other) < worth:
                    return other
        return replace(best, bound=self._bound(limit, best))

    def tried(self, limit: int, tries: int | None = None) -> list[Trial]:
        """Return the planner's choices for a budget, some with results that travel."""
        aim, most = int((_AIM - self._spare) * limit), self._most(limit)
        plain, *travelling = self._problems
        tried = self._planned(aim, most, plain, tries)
        for problem in travelling:
            # One schedule tells whether it is worth while that results travel.
            first = self._planned(aim, most, problem, 1)
            within = [trial for trial in tried if trial.peak <= most]
            least = min(map(self._extra_time, within), default=math.inf)
            is_shorter = self._extra_time(first[0]) < least
            tried += first
            if is_shorter and tries != 1:
                tried += self._planned(aim, most, problem, tries)
        return tried

    def _refined(self, trial: Trial, limit: int) -> Trial:
        """Return a choice that also keeps as much as fits, by time for bytes."""
        run_again = trial.plan.run_again if trial.plan else ()
        made = (op.outputs[0] for op in run_again if op.outputs)
        tensors = sorted(
            filter(tensor_bytes, made),
            key=lambda t: self.time_of(t.op) / tensor_bytes(t),
            reverse=True,
        )
        best, fits, too_many = trial, 0, len(tensors) + 1
        # As many of the first ones as fit, by halving.
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            more = self._trials.run((*trial.kept, *tensors[:middle]))
            if more.peak <= limit:
                fits, best = middle, min(best, more, key=self._extra_time)
            else:
                too_many = middle
        return best

    def _best_within(self, tried: Sequence[Trial], limit: int) -> Trial | None:
        """Return the choice of least time that keeps a budget, well if that can be."""
        within = [trial for trial in tried if trial.peak <= self._most(limit)]
        return min(
            within or [trial for trial in tried if trial.peak <= limit],
            key=lambda trial: (self._extra_time(trial), trial.peak),
            default=None,
        )

    @cached_property
    def _spare(self) -> float:
        """The part of a limit that is left free for the gaps between chunks."""
        allocator = device_of(planned_for(self._step.graph)).allocator
        if allocator is None:
            return 0.0
        return _SPARE_OF_REGIONS if allocator.grows else _SPARE_OF_REGION

    def _most(self, limit: int) -> int:
        return int((_MOST - self._spare) * limit)

    def _leaves_more(self, trial: Trial) -> bool:
        """Return whether updates leave old values, of which no schedule knows."""
        # Of larger problems, only needed budgets are tried.
        is_small = len(self.problem.problem) <= 2500
        return is_small and trial.peak > (1 + _CLOSE) * trial.scheduled_peak

    def least(self, extra_share: float) -> Trial:
        """Return the recomputation of least peak within a share of the step's time."""
        # Of those that hold hardly more, it is the one of least time.
        most = extra_share * self._time
        planned = {}
        for problem in self._problems:
            schedule = schedule_step(
                problem.problem,
                most,
                _moves_for(problem) // 2,
                objective="peak",
                seed=self._budget.seed,
            )
            planned[self._scheduled(problem, schedule)] = problem
        tried = [*planned, self.alone, *self._simple]
        tried = [trial for trial in tried if self._extra_time(trial) <= most]
        lowest = min(tried, key=lambda trial: trial.peak)
        if lowest is self.alone:
            return lowest
        as_low = int(AS_GOOD * lowest.peak)
        problem = planned.get(lowest, self.problem)
        tried += self._planned(lowest.peak, as_low, problem, 1)
        best = min(
            (trial for trial in tried if trial.peak <= as_low), key=self._extra_time
        )
        return replace(best, bound=self._bound(best.peak, best))

    def _scheduled(self, problem: StepProblem, schedule: Schedule) -> Trial:
        """Return the trial of a schedule."""
        plan = problem.recomputation(schedule.runs)
        return self._trials.scheduled(plan, schedule.peak)

    def _bound(self, limit: int, best: Trial) -> float:
        """Return extra time that every schedule within a limit takes, of the step's."""
        problem = self.problem.problem
        # Transfers are in no bound.
        # To write the program of a larger one down takes long.
        if len(problem) > 6000 or len(self._problems) > 1:
            return 0.0
        # Kernels that take over buffers do better than any schedule can: as much as
        # they save the best one is open to others, too.
        saved = max(best.scheduled_peak - best.peak, 0)
        # The first branch, with its cuts, gives most of the bound in a second or two.
        branches = 1 if len(problem) > 400 else 200
        bound = extra_time_bound(problem, limit + saved, branches=branches)
        extra = self._extra_time(best)
        if best.scheduled_peak:
            # Helpers of gradient functions may run less often than the schedule says.
            bound = min(bound, extra)
        # A choice that is no schedule may take less than any: that bounds nothing.
        return bound / (self._time or 1.0) if bound <= extra else 0.0

    def _planned(
        self, limit: int, most: int, problem: StepProblem, tries: int | None = None
    ) -> list[Trial]:
        """Return the planner's choices for budgets around a limit."""
        # A step holds a little more than the planner's schedule, or less: kernels take
        # over buffers, and ops wait for others, of which the planner knows a part.
        # `most` is the highest peak that is accepted, `tries` the most schedules that
        # are made.
        nodes = max(len(problem.problem), 1)
        # At most eight schedules are made, or as many as have 12,000 nodes, but three.
        tries = tries or min(max(12_000 // nodes, 3), 8)
        tried: list[Trial] = []
        found: list[tuple[int, ...]] = []
        points: list[tuple[float, int]] = []
        asked, low, high = float(limit), 0.0, math.inf
        longer, shorter = math.inf, 0.0
        for attempt in range(tries):
            schedule = schedule_step(
                problem.problem,
                asked,
                _moves_for(problem),
                seed=self._budget.seed + attempt,
                found=found,
            )
            # The next budget is near this one.
            found = [schedule.runs]
            # Also where that is more than was asked for: it may be within the budget.
            trial = self._scheduled(problem, schedule)
            tried.append(trial)
            points.append((asked, trial.peak))
            if trial.peak <= most:
                low, longer = max(low, asked), min(longer, schedule.overhead)
            else:
                # Whoever asks for more than the schedule's own peak may get it again.
                high = min(high, asked, schedule.peak)
                shorter = max(shorter, schedule.overhead)
            fits_well = (1 - _CLOSE) * limit < trial.peak <= most
            # The memory of a step differs by more from its schedule.
            is_between = low and high < (1 + 0.03) * low
            gain = (longer - shorter) / (problem.problem.total_time or 1.0)
            if schedule.status == "infeasible" or (
                gain < 0.005 if is_between else fits_well
            ):
                break
            asked = _next_budget(points, limit)
            if low and not low < asked < high:
                asked = (low + high) / 2
        return tried

    def _extra_time(self, trial: Trial) -> float:
        """Return the time of ops that run again and of transfers, by the ops' times."""
        return trial.plan.extra_time(self.time_of) if trial.plan else 0.0


def _next_budget(points: Sequence[tuple[float, int]], limit: float) -> float:
    """Return the budget to ask for, by the last two and the peaks that came of them."""
    asked, peak = points[-1]
    in_proportion = asked * limit / peak
    # At first a peak is taken to be in proportion. It rather has a part that no budget
    # changes, which two points tell.
    before, peak_before = points[-2] if len(points) > 1 else points[-1]
    if (asked - before) * (peak - peak_before) <= 0:
        return in_proportion
    asked += (limit - peak) * (asked - before) / (peak - peak_before)
    return min(max(asked, in_proportion * 0.7), in_proportion / 0.7)


def _moves_for(problem: StepProblem) -> int:
    """Return how many moves a search makes."""
    nodes = max(len(problem.problem), 1)
    return min(_MOVES_A_NODE * nodes, max(_FEW_MOVES, _MOVES_TIMES_NODES // nodes))
