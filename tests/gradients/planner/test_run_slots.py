"""Sequences of runs that are changed in place, against schedules that are replayed."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from geutil.gradients.planner import Problem, Schedule
from testdata.layered import layered, training_chain
from testdata.training_steps import mobilenet

run_slots = pytest.importorskip("geutil.gradients.planner.run_slots")
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


def check(problem: Problem, search: run_slots.SearchState) -> None:
    """Compare all that a search knows of its runs with a schedule of them."""
    schedule = Schedule(problem, tuple(run_slots.current_runs(search)))
    schedule.verify()
    slots = np.nonzero(search.node >= 0)[0]
    held = np.array(schedule.held)
    assert search.level[slots].tolist() == held.tolist()
    budget = search.figures[run_slots.BUDGET]
    assert search.figures[run_slots.EXCESS] == np.maximum(held - budget, 0).sum()
    assert search.figures[run_slots.TIME] == pytest.approx(schedule.time)
    assert search.numbers[run_slots.LENGTH] == len(schedule.runs)
    # Empty slots hold what passes over them.
    across = np.zeros(len(search.level) + 2)
    for slot in slots:
        across[slot] += problem.sizes[search.node[slot]]
        across[search.last[slot] + 1] -= problem.sizes[search.node[slot]]
    span = search.numbers[run_slots.SPAN]
    across = np.cumsum(across)[:span]
    across[slots] += [problem.workspaces[node] for node in search.node[slots]]
    assert across.tolist() == search.level[:span].tolist()
    for node in range(len(problem)):
        runs = [slot for slot in slots if search.node[slot] == node]
        assert search.copies[node] == len(runs)
        assert (search.first[node], search.newest[node]) == (runs[0], runs[-1])
        assert search.before[runs].tolist() == [-1, *runs[:-1]]
        assert search.after[runs].tolist() == [*runs[1:], -1]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_a_search_knows_is_what_its_runs_hold(problem, share):
    nodes = run_slots.nodes_of(problem, problem.fixed_order)
    order = problem.first_order
    search = run_slots.new_search(nodes, order, share * problem.peak(order), 7)
    check(problem, search)
    sequence_search.evict(nodes, search, 50, 0.0, 0)
    check(problem, search)
    for moves in range(1, 60, 3):
        sequence_search.anneal(nodes, search, 0.05, 0.001, moves, 0.0)
        check(problem, search)
        sequence_search.rebuild(nodes, search, 0.01, 0.001, moves, 0.0)
        check(problem, search)


def test_what_is_undone_is_as_it_was():
    problem = mobilenet()
    nodes = run_slots.nodes_of(problem, None)
    order = problem.first_order
    search = run_slots.new_search(nodes, order, 0.6 * problem.peak(order), 0)
    sequence_search.evict(nodes, search, 1000, 0.0, 0)
    assert search.figures[run_slots.EXCESS] == 0.0
    before = {name: array.copy() for name, array in search._asdict().items()}
    slots = [slot for slot in range(len(search.node)) if search.before[slot] >= 0]
    for slot in slots:
        node = search.node[slot]
        if run_slots.take_run(nodes, search, slot):
            run_slots.note(search, -1 - node, slot)
            run_slots.drop_loose(nodes, search)
    run_slots.make_room(nodes, search, int(search.newest[order[-1]]), 40)
    assert search.numbers[run_slots.LENGTH] == len(problem)
    assert search.figures[run_slots.EXCESS] > 0.0
    run_slots.undo(nodes, search, 0)
    for name in ("node", "level", "filled", "first", "newest", "copies"):
        assert np.array_equal(getattr(search, name), before[name]), name
    filled = search.node >= 0
    for name in ("last", "before", "after"):
        assert np.array_equal(getattr(search, name)[filled], before[name][filled]), name


def test_the_cache_of_the_search_knows_its_slots():
    source = Path(run_slots.__file__).read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(source).hexdigest()[:8] == sequence_search.RUN_SLOTS
