"""What is proven of small problems, against every schedule there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from parameterized import parameterized

from geutil.gradients.planner import Problem, Schedule
from geutil.gradients.planner.overhead_bound import extra_time_bound
from testdata.layered import layered, training_chain
from tests.gradients.planner.test_solver import least_time, problems

state_search = pytest.importorskip("geutil.gradients.planner.state_search")


def never() -> float:
    """Tell that no time is over."""
    return 0.0


def check(problem: Problem, budget: int, upper: float, most: int) -> None:
    """Compare what is proven with the least extra time of all schedules."""
    wanted = least_time(problem, budget) - problem.total_time
    close = 1e-9 * max(problem.total_time, 1.0)
    upper = wanted + upper
    bound, runs = state_search.prove(
        problem, problem.fixed_order, budget, upper, never, most
    )
    assert bound <= wanted
    assert extra_time_bound(problem, budget, problem.fixed_order) <= wanted
    extra = upper
    if runs is not None:
        schedule = Schedule(problem, tuple(runs), budget=budget)
        schedule.verify()
        extra = schedule.overhead
        assert schedule.peak <= budget
        assert wanted - close <= extra < upper
    if most > 10_000:
        assert extra <= wanted + close or wanted == math.inf
        assert bound >= wanted - close


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    problems(),
    st.floats(0.3, 1.0),
    st.sampled_from([0.0, 1.0, 5.0, math.inf]),
    st.sampled_from([1, 5, 30, 100_000]),
    st.sampled_from([1.0, 0.37]),
)
def test_no_schedule_takes_less_than_the_bound(problem, share, upper, most, unit):
    # Times that are no whole numbers are added up with rounding.
    problem = Problem(
        [unit * time for time in problem.times],
        problem.sizes,
        problem.edges,
        fixed_order=problem.fixed_order,
        keep=problem.keep,
        no_recompute=problem.no_recompute,
        outputs=problem.outputs,
        workspaces=problem.workspaces,
    )
    note(problem.to_json())
    budget = int(problem.peak(problem.first_order) * share)
    check(problem, budget, upper, most)


@parameterized.expand(
    [(most, upper) for most in (50, 500, 100_000) for upper in (0.0, math.inf)]
)
def test_a_chain_whose_nodes_run_three_times(most, upper):
    problem = training_chain(5)
    assert least_time(problem, 3) == 10 + 6
    check(problem, 3, upper, most)
    for fixed in (problem.topological_order, None):
        again = Problem(
            problem.times,
            problem.sizes,
            problem.edges,
            fixed_order=fixed,
            outputs=problem.outputs,
            workspaces=[0, 1] * 5,
        )
        for budget in (3, 4, 5):
            check(again, budget, upper, most)


def test_an_order_without_a_second_run_is_found():
    problem = layered(250, seed=0)
    budget = 0.8 * problem.peak(problem.first_order)
    bound, runs = state_search.prove(problem, None, budget, math.inf, never, 8000)
    schedule = Schedule(problem, tuple(runs))
    schedule.verify()
    assert schedule.peak <= budget
    assert (bound, schedule.overhead) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("is_fixed", "most", "least"), [(False, 150_000, 0.009), (True, 50_000, 0.08)]
)
def test_random_layers_are_bounded(is_fixed, most, least):
    problem = layered(75, seed=0)
    budget = 0.6 * problem.peak(problem.first_order)
    order = problem.first_order if is_fixed else None
    bound, runs = state_search.prove(problem, order, budget, math.inf, never, most)
    assert runs is None
    assert bound >= least * problem.total_time


def test_it_stops_when_time_is_up():
    problem = layered(75, seed=0)
    bound, runs = state_search.prove(problem, None, 1000, math.inf, lambda: 1.0)
    assert (bound, runs) == (0.0, None)
