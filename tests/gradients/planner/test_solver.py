"""Schedules under a budget, against every schedule there is."""

import heapq
import math

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from parameterized import parameterized

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients.planner import Problem, pareto, solve
from testdata.layered import HERE, KEPT, layered, training_blocks, training_chain
from testdata.training_steps import STEPS
from tests.thorough import thorough

pytest.importorskip("numba")


def least_time(problem: Problem, budget: float) -> float:
    """Return the least time of all schedules, by Dijkstra's search; infinity if none.

    A state is what has run and what is held, as bits. It shares nothing with the
    planner but the numbers of the problem.
    """
    count = len(problem)
    needs = [sum(1 << u for u in problem.inputs[v]) for v in range(count)]
    staying = sum(1 << v for v in {*problem.outputs, *problem.keep})
    keep = sum(1 << v for v in problem.keep)
    once = keep | sum(1 << v for v in problem.no_recompute)
    place = {v: i for i, v in enumerate(problem.fixed_order or ())}

    def size(bits: int) -> int:
        return sum(problem.sizes[v] for v in range(count) if bits >> v & 1)

    everyone = (1 << count) - 1
    best = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        time, ran, held = heapq.heappop(queue)
        if time > best[ran, held]:
            continue
        if ran == everyone and held & staying == staying:
            return time
        steps = []
        for v in range(count):
            if held >> v & 1:
                if not keep >> v & 1:
                    steps.append((time, ran, held & ~(1 << v)))
                continue
            if needs[v] & ~held or (once & ran) >> v & 1:
                continue
            if place and not ran >> v & 1:
                before = [u for u in place if place[u] < place[v]]
                if any(not ran >> u & 1 for u in before):
                    continue
            if size(held | 1 << v) + problem.workspaces[v] <= budget:
                steps.append((time + problem.times[v], ran | 1 << v, held | 1 << v))
        for then, now, kept in steps:
            if then < best.get((now, kept), math.inf):
                best[now, kept] = then
                heapq.heappush(queue, (then, now, kept))
    return math.inf


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a small problem, some with nodes of no time, no size or a workspace."""
    count = draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    # Times that are no whole numbers are added up with rounding.
    unit = draw(st.sampled_from([1.0, 0.37]))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = [pair for pair in pairs if draw(st.booleans())]
    some = st.lists(st.integers(0, count - 1), max_size=2)
    order = list(range(count)) if draw(st.booleans()) else None
    return Problem(
        [unit * time for time in draw(numbers)],
        draw(numbers),
        edges,
        fixed_order=order,
        keep=draw(some),
        no_recompute=draw(some),
        outputs=draw(some),
        workspaces=draw(st.one_of(st.just([]), numbers)),
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.floats(0.3, 1.0))
def test_no_schedule_of_a_small_problem_is_better(problem, share):
    note(problem.to_json())
    check_least(problem, int(problem.peak(problem.first_order) * share))


def check_least(problem: Problem, budget: int) -> None:
    """Compare the schedule found, and the bound, with the least time of all."""
    wanted = least_time(problem, budget)
    found = solve(problem, budget, iterations=60_000, workers=1)
    found.verify()
    assert found.lower_bound <= wanted - problem.total_time + 1e-6
    if wanted == math.inf:
        assert found.status == "infeasible"
        return
    assert found.status != "infeasible", str(found)
    assert found.peak <= budget
    assert found.time == pytest.approx(wanted), str(found)
    assert found.lower_bound <= found.overhead + 1e-9
    assert found.gap >= 0


def test_what_runs_once_need_not_be_held_if_nothing_reads_it_again():
    # While 4 runs, 1 and 3 are held and 2 is gone; 0, which runs once, for good.
    edges = [(0, 1), (1, 3), (2, 3), (3, 4), (4, 5), (1, 6), (2, 6), (5, 6)]
    sizes = [10, 1, 5, 1, 10, 1, 1]
    problem = Problem([1] * 7, sizes, edges, no_recompute=[0])
    assert least_time(problem, 13) == 8
    for reorder in (True, False):
        schedule = solve(problem, 13, iterations=3000, workers=1, reorder=reorder)
        assert (schedule.status, schedule.overhead) == ("optimal", 1)
        assert schedule.lower_bound == 1


def test_what_is_hardly_a_problem():
    line = [(0, 1), (1, 2)]
    cases = {
        "none": (Problem([], [], []), 0, "optimal", 0),
        "one": (Problem([2], [8], []), 8, "optimal", 8),
        "too little": (Problem([2], [8], []), 7, "infeasible", 8),
        "apart": (Problem([1, 1], [8, 8], []), 8, "optimal", 8),
        "no time": (Problem([0] * 3, [1] * 3, line), 2, "optimal", 2),
    }
    wrong = {}
    for name, (problem, budget, *expected) in cases.items():
        schedule = solve(problem, budget, iterations=100, workers=1)
        schedule.verify()
        found = [schedule.status, schedule.peak, schedule.overhead]
        if found != [*expected, 0.0]:
            wrong[name] = found
    assert wrong == {}


def test_an_infeasible_budget_says_what_is_known():
    schedule = solve(training_chain(10), 2, iterations=2000, workers=1)
    assert schedule.status == "infeasible"
    assert "no schedule within 2 bytes exists" in str(schedule)
    assert "none is below 3" in str(schedule)


def test_a_chain_of_a_hundred_in_one_more_forward_pass():
    # Griewank and Walther's revolve needs 14 for it.
    schedule = solve(
        training_chain(100), 100, objective="peak", iterations=20_000, workers=1
    )
    schedule.verify()
    assert schedule.overhead <= 100
    assert schedule.peak <= 15
    # Of a short one no schedule has a byte less.
    short = training_chain(6)
    for extra in (1, 2, 3):
        schedule = solve(short, extra, objective="peak", iterations=2000, workers=1)
        assert schedule.overhead <= extra
        assert least_time(short, schedule.peak - 1) > short.total_time + extra


@parameterized.expand([(30, 71), (20, 81)])
def test_a_chain_is_proven(budget, extra):
    # Of a hundred, all but one less than fit run again, the last one never.
    schedule = solve(training_chain(100), budget, iterations=200_000, workers=1)
    schedule.verify()
    assert (schedule.status, schedule.overhead) == ("optimal", extra)


def kept_problem(name):
    return Problem.from_json(HERE / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "share", "most"),
    [
        pytest.param("resnet50", 0.8, 0.013, marks=thorough),
        pytest.param("resnet50", 0.5, 0.045, marks=thorough),
        ("resnet50", 0.25, 0.15),
        ("mobilenet", 0.5, 0.105),
        ("decoder_12", 0.5, 0.047),
        pytest.param("resnet152", 0.25, 0.1, marks=thorough),
        # Of a real step, and random layers.
        ("step_unet", 0.5, 0.07),
        pytest.param("step_unet", 0.33, 0.25, marks=thorough),
        *((f"layered_{nodes}_{seed}", 0.8, 0.01) for nodes, seed in KEPT[:5:4]),
        ("eight thousand nodes", 0.5, 0.2),
    ],
)
def test_steps_cost_little_within_part_of_their_peak(name, share, most):
    if name == "eight thousand nodes":
        problem, iterations = training_blocks(8000), 100
    else:
        problem = STEPS[name]() if name in STEPS else kept_problem(name)
        iterations = 300_000 if name.startswith("layered") else 60_000
    budget = share * problem.peak(problem.first_order)
    schedule = solve(problem, budget, iterations=iterations, workers=1)
    schedule.verify()
    assert schedule.peak <= budget
    assert schedule.overhead <= most * problem.total_time
    assert schedule.lower_bound <= schedule.overhead + 1e-9


def test_the_generator_makes_what_is_kept():
    for nodes, seed in KEPT:
        kept = (HERE / f"layered_{nodes}_{seed}.json").read_text()
        assert layered(nodes, seed=seed).to_json() == kept.strip()


def test_the_same_seed_gives_the_same_schedule():
    problem = layered(50, seed=5)
    budget = 0.7 * problem.peak(problem.first_order)
    options = {"iterations": 5000, "workers": 2}
    first, again = (solve(problem, budget, seed=3, **options) for _ in range(2))
    assert first.runs == again.runs
    assert first.status == again.status


def test_an_order_that_is_fixed_stays():
    problem = layered(60, seed=1)
    order = problem.first_order
    fixed = Problem(problem.times, problem.sizes, problem.edges, fixed_order=order)
    budget = 0.9 * problem.peak(order)
    schedules = [
        solve(fixed, budget, iterations=20_000, workers=1),
        solve(problem, budget, iterations=20_000, workers=1, reorder=False),
    ]
    for schedule in schedules:
        schedule.verify()
        assert tuple(dict.fromkeys(schedule.runs)) == order
        # Nothing was proven that another order would break.
        assert schedule.lower_bound <= schedule.overhead + 1e-9


def test_improvements_are_told_as_they_come():
    told = []
    problem = training_chain(30)
    schedule = solve(problem, 12, iterations=20_000, workers=1, progress=told.append)
    assert tuple(told) == schedule.history
    overheads = [improvement.overhead for improvement in told]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == schedule.overhead


def test_less_memory_costs_more_time(tmp_path):
    problem = training_chain(24)
    curve = pareto(problem, 5, iterations=20_000, workers=1)
    extra = [p.schedule.overhead for p in curve.points]
    met = [p for p in curve.points if p.schedule.status != "infeasible"]
    assert len(met) >= 4
    assert extra[0] == 0.0
    assert [p.schedule.overhead for p in met] == sorted(
        p.schedule.overhead for p in met
    )
    assert all(p.schedule.peak <= p.budget for p in met)
    assert curve.plot(tmp_path / "curve.png").stat().st_size > 1000
    with pytest.raises(PlanError, match="budget"):
        pareto(problem, [])
    with pytest.raises(ArgumentTypeError, match="'time' or 'peak'"):
        solve(problem, 5, objective="money")


@pytest.mark.parametrize("budget", [3, 4, 5])
def test_a_chain_whose_nodes_run_three_times(budget):
    problem = training_chain(5)
    assert least_time(problem, 3) == 10 + 6
    check_least(problem, budget)
    for fixed in (problem.topological_order, None):
        check_least(
            Problem(
                problem.times,
                problem.sizes,
                problem.edges,
                fixed_order=fixed,
                outputs=problem.outputs,
                workspaces=[0, 1] * 5,
            ),
            budget,
        )


def test_an_order_without_a_second_run_is_found():
    problem = layered(250, seed=0)
    budget = 0.8 * problem.peak(problem.first_order)
    schedule = solve(problem, budget, iterations=200_000, workers=1)
    schedule.verify()
    assert (schedule.status, schedule.overhead) == ("optimal", 0.0)
