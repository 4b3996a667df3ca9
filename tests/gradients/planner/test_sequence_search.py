"""Sequences of runs that are changed in place, against schedules that are replayed."""

import numpy as np
import pytest

from geutil.gradients.planner import Problem, Schedule
from testdata.layered import layered, training_chain
from testdata.training_steps import mobilenet

sequence_search = pytest.importorskip("geutil.gradients.planner.sequence_search")


def restricted(seed: int) -> Problem:
    """Return a random problem with every restriction, its order fixed for odd seeds."""
    free = layered(40, seed=seed)
    return Problem(
        free.times,
        free.sizes,
        free.edges,
        outputs=[3, 8],
        keep=[5],
        no_recompute=[2, 9, 10],
        fixed_order=free.first_order if seed % 2 else None,
        workspaces=[17 * v * v % 50 if v % 3 else 0 for v in range(40)],
    )


PROBLEMS = [layered(50, seed=1), training_chain(20), restricted(2), restricted(3)]


def new_search(problem: Problem, share: float) -> sequence_search.SearchState:
    """Return a search at a problem's order, within a share of its peak."""
    arrays = sequence_search.arrays_of(problem, problem.fixed_order)
    order = problem.first_order
    return sequence_search.new_search(arrays, order, share * problem.peak(order), 7)


def check(problem: Problem, search: sequence_search.SearchState) -> None:
    """Compare all that a search knows of its runs with a schedule of them."""
    schedule = Schedule(problem, tuple(search.runs))
    schedule.verify()
    now, places = search.now[0], search.places
    node, last = search.slots["node"], search.slots["last"]
    slots = np.nonzero(node >= 0)[0]
    held = np.array(schedule.held)
    assert search.level[slots].tolist() == held.tolist()
    assert now["excess"] == np.maximum(held - now["budget"], 0).sum()
    assert now["time"] == pytest.approx(schedule.time)
    assert now["length"] == len(schedule.runs)
    # Empty slots hold what passes over them.
    across = np.zeros(len(search.level) + 2)
    for slot in slots:
        across[slot] += problem.sizes[node[slot]]
        across[last[slot] + 1] -= problem.sizes[node[slot]]
    across = np.cumsum(across)[: now["span"]]
    across[slots] += [problem.workspaces[v] for v in node[slots]]
    assert across.tolist() == search.level[: now["span"]].tolist()
    for v in range(len(problem)):
        runs = [slot for slot in slots if node[slot] == v]
        assert places[v].tolist() == (runs[0], runs[-1], len(runs))
        assert search.slots["before"][runs].tolist() == [-1, *runs[:-1]]
        assert search.slots["after"][runs].tolist() == [*runs[1:], -1]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_a_search_knows_is_what_its_runs_hold(problem, share):
    search = new_search(problem, share)
    check(problem, search)
    sequence_search.evict(search, 50, 0.0, 0)
    check(problem, search)
    for moves in range(1, 80, 3):
        shifted = 0.9 if moves % 2 else 0.2
        sequence_search.rebuild(search, shifted, 0.05, 0.001, moves, 0.0)
        check(problem, search)


def test_what_is_undone_is_as_it_was():
    search = new_search(mobilenet(), 0.6)
    sequence_search.evict(search, 1000, 0.0, 0)
    assert search.now[0]["excess"] == 0.0
    undone = 0
    for _ in range(200):
        before = {name: array.copy() for name, array in search._asdict().items()}
        time = search.now[0]["time"]
        # Below 0, so that only less time is taken.
        sequence_search.rebuild(search, 0.5, -1e-9, -1e-9, 1, 0.0)
        was = before["now"][0]
        spread = search.now[0]["slid"] < was["slid"]
        if spread or search.now[0]["time"] != time:
            continue
        undone += search.now[0]["dice"] != was["dice"]
        for name in ("places", "level", "filled"):
            assert np.array_equal(getattr(search, name), before[name]), name
        filled = search.slots["node"] >= 0
        assert np.array_equal(filled, before["slots"]["node"] >= 0)
        assert np.array_equal(search.slots[filled], before["slots"][filled])
    assert undone > 100
