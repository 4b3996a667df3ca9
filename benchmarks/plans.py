"""Plans under a byte budget: what `geutil.gradients.planner` finds, in how long.

`python -m benchmarks.plans [--json PATH]`. Every instance is solved in the time that
its target allows; the first call of all, which compiles, comes before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from geutil.gradients.planner import Problem, Schedule, solve
from testdata.layered import KEPT, layered, training_blocks, training_chain
from testdata.training_steps import STEPS

SHARE = 0.8
_SMALL = 75
_STEP_SHARES = (0.8, 0.5, 0.25)
_STEP_LIMIT = 10


@dataclass(frozen=True)
class PlanRow:
    """One problem under one budget.

    Attributes:
        problem: its name.
        nodes: how many it has.
        budget: the share of the peak of its own order; of "order", of the least peak
            of an order that was found.
        status: of the schedule.
        overhead: extra time, in percent.
        gap: what may be left at most, in percent.
        seconds: until the last improvement, and until the end.
        wanted: the limit, as text.
    """

    problem: str
    nodes: int
    budget: str
    status: str
    overhead: float
    gap: float
    peak: int
    last: float
    seconds: float
    wanted: str


# Nodes, the share of the budget, the seconds and the most overhead in percent.
LIMITS = {100: (10, 0.3), 250: (20, 0.5), 500: (30, 2.5), 1000: (40, 2.5)}


def rows() -> Iterator[PlanRow]:
    """Solve every instance, and yield its row."""
    solve(training_chain(10), 6, iterations=1000)
    for nodes, seed in (*KEPT, (1000, 0), (1000, 1)):
        problem = layered(nodes, seed=seed)
        limit, most = LIMITS[nodes]
        for name, peak in _orders(problem):
            said = f"layered_{nodes}_{seed}"
            yield _row(said, problem, name, peak, limit, f"{most} %")
    for seed in range(3):
        problem = layered(_SMALL, seed=seed)
        for name, order in _orders(problem):
            yield _row(f"layered_{_SMALL}_{seed}", problem, name, order, 30, "a proof")
    for name, made in STEPS.items():
        problem = made()
        peak = problem.peak(problem.first_order)
        for share in _STEP_SHARES:
            said = f"{share:.0%} of its peak"
            yield _solved(name, problem, share * peak, said, _STEP_LIMIT, "less")
    blocks = training_blocks(8000)
    peak = blocks.peak(blocks.first_order)
    yield _solved("blocks_8000", blocks, peak / 2, "50% of its peak", 60, "feasible")
    yield _chain()


def _orders(problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield the two peaks that a budget is a share of."""
    yield "its peak", problem.peak(problem.first_order)
    least = solve(problem, 0, objective="peak", time_limit=10)
    yield "the least by order", least.peak


def _row(
    name: str, problem: Problem, of: str, peak: float, limit: float, wanted: str
) -> PlanRow:
    budget = SHARE * peak
    return _solved(name, problem, budget, f"{SHARE:.0%} of {of}", limit, wanted)


def _solved(
    name: str, problem: Problem, budget: float, said: str, limit: float, wanted: str
) -> PlanRow:
    began = perf_counter()
    schedule = solve(problem, budget, time_limit=limit)
    return _told(name, schedule, said, perf_counter() - began, wanted)


def _told(
    name: str, schedule: Schedule, budget: str, seconds: float, wanted: str
) -> PlanRow:
    schedule.verify()
    total = schedule.problem.total_time
    return PlanRow(
        name,
        len(schedule.problem),
        budget,
        schedule.status,
        100 * schedule.overhead / total,
        100 * schedule.gap,
        schedule.peak,
        schedule.history[-1].seconds if schedule.history else 0.0,
        seconds,
        wanted,
    )


def _chain() -> PlanRow:
    """Return the least peak of a chain in one more forward pass."""
    began = perf_counter()
    schedule = solve(training_chain(100), 100, objective="peak", time_limit=30)
    seconds = perf_counter() - began
    return _told("chain_100", schedule, "one forward pass", seconds, "peak 15")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.plans")
    parser.add_argument("--json", type=Path, help="write the rows, not rounded")
    options = parser.parse_args()
    print(
        "| problem | nodes | budget | status | extra time | gap | peak | last, s | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for row in rows():
        found.append(row)
        print(
            f"| {row.problem} | {row.nodes} | {row.budget} | {row.status} | "
            f"{row.overhead:.2f} % (wanted: {row.wanted}) | {row.gap:.2f} % | "
            f"{row.peak} | {row.last:.1f} | {row.seconds:.1f} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
