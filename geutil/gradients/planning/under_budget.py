"""The least recomputation whose predicted peak is within a budget.

The step is told to the planner: forward and backward ops are its nodes, views part of
what they show, and forward ops may run a second time. What its schedule runs once is
kept. A choice is worth what a simulation of the whole step says of it, since segments
run again as a whole; so the planner is asked for several budgets, until the simulated
peak is just within the given one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import tensor_sizes
from geutil.gradients.costs import op_time
from geutil.gradients.planner.solver import solve
from geutil.gradients.planning.least_peak import choose_for_memory
from geutil.gradients.planning.local_search import Trial, Trials
from geutil.gradients.planning.step_problem import StepProblem, step_problem
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps
from geutil.gradients.step import PlainStep
from geutil.graph.types import Tensor
from geutil.memory.sizes import byte_count, megabytes

_TRIES = 4
_MOVES = 60_000
_SEARCHES = 2
_CLOSE = 0.01
"""Between two shares that the planner is asked for; nearer ones make no difference."""


@dataclass(frozen=True)
class Budget:
    """How much a step may hold at its peak.

    Attributes:
        limit: bytes; a text such as "1.5GB", "800 MiB" or "50%"; or a part of what
            plain gradients hold, above 0 and up to 1.
        seed: of the planner's random numbers.

    Raises:
        ArgumentTypeError: the limit is none of these.

    Example:
        >>> Budget("1.5GB").bytes(10**10), Budget(0.5).bytes(400), Budget(64).bytes(1)
        (1500000000, 200, 64)
    """

    limit: int | float | str
    seed: int = 0

    def __post_init__(self) -> None:
        if self._share is None and byte_count(self.limit) is None:
            raise ArgumentTypeError(
                "a budget is a number of bytes, a text such as '1.5GB' or '50%', or a "
                f"part of plain gradients' peak up to 1.0, got {self.limit!r}"
            )

    def __str__(self) -> str:
        if self._share is not None:
            return f"budget of {100 * self._share:g} % of plain gradients"
        return f"budget of {megabytes(self.bytes(0))}"

    def bytes(self, plain_peak: int) -> int:
        """Return the budget in bytes.

        Args:
            plain_peak: what plain gradients hold.
        """
        if self._share is not None:
            return int(self._share * plain_peak)
        return byte_count(self.limit) or 0

    @property
    def _share(self) -> float | None:
        """The part of plain gradients, if the limit is one."""
        share = self.limit
        if isinstance(share, str):
            number, percent, rest = share.partition("%")
            try:
                share = float(number) / 100 if percent and not rest.strip() else 0.0
            except ValueError:
                return None
        return share if isinstance(share, float) and 0 < share <= 1 else None


def choose_within(
    step: PlainStep,
    always: Keeps,
    budget: Budget,
    others: Iterable[Sequence[Tensor]] = (),
) -> tuple[Trial, int]:
    """Return the recomputation of least time within a budget.

    Tried are the planner's schedules, the choice of the least peak, and others. Of each
    choice that is within the budget, as much as fits is then kept besides, what takes
    longest to compute for its bytes first.

    Args:
        step: the step with plain gradients.
        always: tells which tensors are kept whatever is chosen.
        budget: what the peak may be.
        others: choices of kept tensors that are tried besides.

    Returns:
        The choice, which recomputes nothing where order alone is within the budget, and
        the budget in bytes.

    Raises:
        PlanError: no choice was found; it names the least peak that was.
        MissingExtraError: numba or OR-Tools is not installed.

    Cost: that of `choose_for_memory`, the planner's, and some 30 simulations.
    """
    limit = budget.bytes(StepProgram(step).plain_peak())
    trials = Trials(step, always, with_updates=True)
    alone = trials.without()
    if alone.peak <= limit:
        return alone, limit
    least = choose_for_memory(step, always)
    tried = [trials.run(kept) for kept in (*others, least.kept) if kept]
    problem = step_problem(step, always, trials.program)
    tried += _planned(problem, trials, (limit, alone.peak), budget.seed)
    within = [trial for trial in tried if trial.peak <= limit]
    if not within:
        lowest = min([alone, *tried], key=lambda trial: trial.peak)
        raise PlanError(
            "no choice of checkpoints was found whose predicted peak is within "
            f"{megabytes(limit)}; the least that was found is "
            f"{megabytes(lowest.peak)}; pass a larger budget, or a smaller batch"
        )
    refined = [_refined(trials, trial, limit) for trial in within]
    return min(refined, key=lambda trial: (_extra_time(trial), trial.peak)), limit


def _extra_time(trial: Trial) -> float:
    """Return how long what is recomputed takes, in multiply-adds of a convolution."""
    segments = trial.plan.segments if trial.plan else ()
    return sum(op_time(op) for segment in segments for op in segment.ops)


def _planned(
    problem: StepProblem, trials: Trials, peaks: tuple[int, int], seed: int
) -> Iterator[Trial]:
    """Yield the planner's choices for budgets around the one that is wanted.

    A step holds more than the planner's schedule, or less: kernels take memory besides
    and take over buffers, which the planner does not know.

    Args:
        problem: the step.
        trials: of the step.
        peaks: the budget, and the simulated peak by order alone.
        seed: of the planner's random numbers.
    """
    alone = problem.problem.peak(problem.problem.first_order)
    limit, simulated_alone = peaks
    share = limit / simulated_alone
    asked, low, high = share, 0.0, 1.0
    for _ in range(_TRIES):
        schedule = solve(
            problem.problem,
            asked * alone,
            iterations=_MOVES,
            workers=_SEARCHES,
            seed=seed,
        )
        # Also where that is more than was asked for: it may be within the budget.
        trial = trials.scheduled(problem.recomputation(schedule.runs))
        yield trial
        again = _run_twice(schedule.runs)
        yield trials.run([t for node, t in problem.tensors if node not in again])
        if trial.peak <= limit:
            low = asked
        else:
            high = asked
        if schedule.status == "infeasible" or high - low < _CLOSE:
            return
        if trial.peak > (1 - _CLOSE) * limit and trial.peak <= limit:
            return
        asked *= limit / trial.peak * (1 - _CLOSE / 4)
        if low and not low < asked < high:
            asked = (low + high) / 2


def _run_twice(runs: Sequence[int]) -> frozenset[int]:
    met: set[int] = set()
    again: set[int] = set()
    for node in runs:
        (again if node in met else met).add(node)
    return frozenset(again)


def _refined(trials: Trials, trial: Trial, limit: int) -> Trial:
    """Return a choice that also keeps as much as fits, what is worth most first."""
    candidates = [
        (op.outputs[0], op_time(op) / size)
        for segment in (trial.plan.segments if trial.plan else ())
        for op in segment.ops
        if op.outputs and (size := tensor_sizes.tensor_bytes(op.outputs[0]))
    ]
    candidates.sort(key=lambda pair: -pair[1])
    tensors = [tensor for tensor, _ in candidates]
    best, fits, too_many = trial, 0, len(tensors) + 1
    # As many of the first ones as fit, by halving.
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        more = trials.run((*trial.kept, *tensors[:middle]))
        if more.peak <= limit:
            fits = middle
            best = min(best, more, key=_extra_time)
        else:
            too_many = middle
    return best
