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
from geutil.gradients import costs, segments, tensor_sizes
from geutil.gradients.planner.problem import Problem
from geutil.gradients.planner.solver import solve
from geutil.gradients.planning.least_peak import choose_for_memory
from geutil.gradients.planning.local_search import Trial, Trials
from geutil.gradients.segments import Keeps
from geutil.gradients.step import PlainStep
from geutil.graph.types import Operation, Tensor
from geutil.memory import scheduling
from geutil.memory.program import Program
from geutil.memory.sizes import byte_count, megabytes

_SLOW = 16
"""What moving an element costs, in multiply-adds of a convolution or product."""
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
) -> Trial:
    """Return the choice of kept tensors of least compute within a budget.

    Tried are the planner's choices, the one of the least peak, and others. Of each that
    is within the budget, as much as fits is then kept besides, what costs most to
    compute for its bytes first.

    Args:
        step: the step with plain gradients.
        always: tells which tensors are kept whatever is chosen.
        budget: what the peak may be.
        others: choices that are tried besides.

    Returns:
        The choice; it keeps nothing where order alone is within the budget.

    Raises:
        PlanError: no choice was found; it names the least peak that was.
        MissingExtraError: numba or OR-Tools is not installed.

    Cost: that of `choose_for_memory`, the planner's, and some 30 simulations.
    """
    trials = Trials(step, always)
    limit = budget.bytes(trials.program.plain_peak())
    alone = trials.without()
    if alone.peak <= limit:
        return alone
    least = choose_for_memory(step, always)
    tried = [trials.run(kept) for kept in (*others, least.kept) if kept]
    problem, tensors = step_problem(step, always, trials)
    tried += _planned(problem, tensors, trials, (limit, alone.peak), budget.seed)
    within = [trial for trial in tried if trial.peak <= limit]
    if not within:
        lowest = min([alone, *tried], key=lambda trial: trial.peak)
        raise PlanError(
            "no choice of checkpoints was found whose predicted peak is within "
            f"{megabytes(limit)}; the least that was found is "
            f"{megabytes(lowest.peak)}; pass a larger budget, or a smaller batch"
        )
    refined = [_refined(trials, trial, limit) for trial in within]
    return min(refined, key=lambda trial: (trial.cost, trial.peak))


def _planned(
    problem: Problem,
    tensors: Sequence[tuple[int, Tensor]],
    trials: Trials,
    peaks: tuple[int, int],
    seed: int,
) -> Iterator[Trial]:
    """Yield the planner's choices for budgets around the one that is wanted.

    Segments run again as a whole, so they hold more than the planner's schedule, which
    runs each op again when it is needed.

    Args:
        problem: the step, as `step_problem` has it.
        tensors: those that could be recomputed, each with its node.
        trials: of the step.
        peaks: the budget, and the simulated peak by order alone.
        seed: of the planner's random numbers.
    """
    alone = problem.peak(problem.first_order)
    limit, simulated_alone = peaks
    share = limit / simulated_alone
    asked, low, high = share, 0.0, 1.0
    for _ in range(_TRIES):
        schedule = solve(
            problem, asked * alone, iterations=_MOVES, workers=_SEARCHES, seed=seed
        )
        if schedule.status == "infeasible":
            return
        again = _run_twice(schedule.runs)
        trial = trials.run([t for node, t in tensors if node not in again])
        yield trial
        if trial.peak <= limit:
            low = asked
        else:
            high = asked
        if high - low < _CLOSE:
            return
        asked = (low + high) / 2 if low else asked * limit / trial.peak


def _run_twice(runs: Sequence[int]) -> frozenset[int]:
    met: set[int] = set()
    again: set[int] = set()
    for node in runs:
        (again if node in met else met).add(node)
    return frozenset(again)


def _refined(trials: Trials, trial: Trial, limit: int) -> Trial:
    """Return a choice that also keeps as much as fits, what is worth most first."""
    candidates = [
        (op.outputs[0], _time(op) / size)
        for segment in trials.segments(trial.kept)
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
            best = min(best, more, key=lambda t: t.cost)
        else:
            too_many = middle
    return best


def step_problem(
    step: PlainStep, always: Keeps, trials: Trials
) -> tuple[Problem, list[tuple[int, Tensor]]]:
    """Return a step as a problem of the planner.

    Args:
        step: the step with plain gradients.
        always: tells which tensors are kept whatever is chosen.
        trials: of the step.

    Returns:
        The problem, and the tensors that could be recomputed, each with its node.

    Cost: linear in the ops of the step and their edges.
    """
    program = trials.program.program()
    ops = trials.program.ops
    leader = _leaders(program)
    order = scheduling.frugal_order(program)
    number: dict[int, int] = {}
    for i in order:
        number.setdefault(leader[i], len(number))
    node_of = [number[leader[i]] for i in range(len(program.nodes))]
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    times, sizes = [0.0] * len(number), [0] * len(number)
    edges: set[tuple[int, int]] = set()
    for i, node in enumerate(program.nodes):
        times[node_of[i]] += _time(ops[i])
        shared = {output for output, _ in node.aliases}
        sizes[node_of[i]] += sum(
            program.sizes[t] for o, t in enumerate(node.outputs) if o not in shared
        )
        edges |= {(node_of[maker[t]], node_of[i]) for t in node.inputs}
    # What a view reads besides, its shape, may be made behind the buffer that it shows.
    edges = {(a, b) for a, b in edges if a < b}
    again, tensors = _recomputable(step, always, ops, node_of)
    once = [node for node in range(len(number)) if node not in again]
    outputs = {node_of[maker[t]] for t in program.fetched}
    problem = Problem(times, sizes, edges, no_recompute=once, outputs=outputs)
    return problem, tensors


def _leaders(program: Program) -> list[int]:
    """Return, for each node, the one whose buffer it shows, itself if it makes one."""
    leader = list(range(len(program.nodes)))
    maker: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        for t in node.outputs:
            maker[t] = i
    for i, node in enumerate(program.nodes):
        is_view = len(node.aliases) == len(node.outputs) > 0
        if is_view:
            leader[i] = leader[maker[node.inputs[node.aliases[0][1]]]]
    return leader


def _recomputable(
    step: PlainStep, always: Keeps, ops: Sequence[Operation], node_of: Sequence[int]
) -> tuple[set[int], list[tuple[int, Tensor]]]:
    """Return the nodes that may run again, and their tensors."""
    roots = [t.op for _, _, t in segments.forward_inputs(step) if not always(t)]
    behind = frozenset(segments.ops_behind(roots, always))
    free: dict[int, bool] = {}
    tensors = []
    for op, node in zip(ops, node_of, strict=True):
        may = op in behind and not any(always(t) for t in op.outputs)
        free[node] = free.get(node, True) and may
        if may:
            tensors += [(node, t) for t in op.outputs]
    again = {node for node, may in free.items() if may}
    return again, [(node, t) for node, t in tensors if node in again]


def _time(op: Operation) -> float:
    """Return about how long an op takes, in multiply-adds of a convolution."""
    amount = costs.multiply_adds(op)
    return float(amount if op.type in costs.HEAVY else _SLOW * amount)
