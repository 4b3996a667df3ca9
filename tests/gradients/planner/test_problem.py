"""Problems of the planner, and the schedules that are replayed."""

import json
import math
import re

import networkx
import pytest
from parameterized import parameterized

from geutil.errors import ArgumentTypeError, PlanError, PlotError
from geutil.gradients.planner import Problem, Schedule, solve
from testdata.layered import layered, training_chain
from tests.processes import run_python

CHAIN = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]


@parameterized.expand(
    [
        ("cycle", [1, 1, 1], [1, 1, 1], [(0, 1), (1, 2), (2, 0)], {}, "0 -> .*0"),
        ("self", [1], [1], [(0, 0)], {}, "cycle: 0 -> 0"),
        ("negative_size", [1], [-1], [], {}, "size of node 0 is -1"),
        ("negative_time", [-1], [1], [], {}, "time of node 0 is -1"),
        ("time", [math.nan], [1], [], {}, "time of node 0 is nan"),
        ("lengths", [1, 2], [1], [], {}, "2 times, but 1 sizes"),
        ("workspaces", [1], [1], [], {"workspaces": [1, 2]}, "1 times, but 2 worksp"),
        ("negative_work", [1], [1], [], {"workspaces": [-2]}, "workspace of node 0"),
        ("edge", [1], [1], [(0, 1)], {}, "edges names node 1"),
        ("output", [1], [1], [], {"outputs": [3]}, "outputs names node 3"),
        ("order", [1, 1], [1, 1], [(0, 1)], {"fixed_order": [1, 0]}, "before its inp"),
        ("twice", [1, 1], [1, 1], [], {"fixed_order": [1, 1]}, "every node once"),
    ]
)
def test_refusals(_, times, sizes, edges, options, said):
    with pytest.raises(PlanError, match=said):
        Problem(times, sizes, edges, **options)


def test_a_long_cycle_is_found_without_recursion():
    count = 100_000
    edges = [(i, (i + 1) % count) for i in range(count)]
    with pytest.raises(PlanError, match="cycle"):
        Problem([1] * count, [1] * count, edges)


@pytest.mark.parametrize("seed", range(4))
def test_orders_and_peaks_are_networkx_s(seed):
    problem = layered(60, seed=seed)
    graph = networkx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(problem)))
    place = {v: i for i, v in enumerate(problem.topological_order)}
    assert all(place[a] < place[b] for a, b in graph.edges)
    order = list(networkx.lexicographical_topological_sort(graph))
    assert list(problem.topological_order) == order
    # By the definition: what has run and is still read, or runs now.
    held = []
    for i, node in enumerate(order):
        later = set(order[i:])
        waiting = {u for u in order[:i] if later & set(graph.successors(u))}
        held.append(sum(problem.sizes[u] for u in {*waiting, node}))
    assert problem.peak(order) == max(held)
    assert Schedule(problem, tuple(order)).held == tuple(held)


def test_networkx_and_json_give_the_same_problem(tmp_path):
    problem = Problem(
        [1, 2.5, 0],
        [3, 0, 5],
        [(0, 1), (1, 2)],
        keep=[1],
        outputs=[2],
        no_recompute=[0],
        workspaces=[0, 7, 0],
    )
    graph = networkx.DiGraph()
    for v, (time, size) in enumerate(zip(problem.times, problem.sizes, strict=True)):
        graph.add_node(f"n{v}", cost=time, bytes=size)
    graph.nodes["n1"]["workspace"] = 7
    graph.add_edges_from((f"n{a}", f"n{b}") for a, b in problem.edges)
    options = {"keep": [1], "outputs": [2], "no_recompute": [0]}
    read = Problem.from_networkx(graph, "cost", "bytes", **options)
    path = tmp_path / "problem.json"
    problem.to_json(path)
    for other in (read, Problem.from_json(path), Problem.from_json(problem.to_json())):
        assert vars(other) == vars(problem)
    graph = networkx.node_link_graph(json.loads(problem.to_json()), edges="edges")
    assert set(graph.edges) == set(problem.edges)
    assert graph.nodes[2]["size"] == problem.sizes[2]


def test_a_workspace_is_held_while_its_node_runs():
    problem = Problem([1] * 5, [8] * 5, CHAIN, workspaces=[0, 0, 100, 0, 0])
    schedule = Schedule(problem, (0, 1, 2, 3, 4))
    schedule.verify()
    # The first output waits for the last node; the third reads the second.
    assert schedule.held == (8, 16, 124, 24, 24)
    assert (schedule.peak, problem.peak(schedule.runs)) == (124, 124)
    assert problem.least_budget == 116
    # Without the first output, which is made again: what is best for the workspace.
    assert solve(problem, 120, iterations=2000, workers=1).overhead == 1.0


def test_what_is_no_problem_is_refused(tmp_path):
    with pytest.raises(PlanError, match="node-link"):
        Problem.from_json("{}")
    with pytest.raises(PlanError, match="no attribute 'time'"):
        Problem.from_networkx(networkx.path_graph(2, networkx.DiGraph))
    with pytest.raises(ArgumentTypeError, match=r"networkx\.DiGraph"):
        Problem.from_networkx(networkx.path_graph(2))
    with pytest.raises(FileNotFoundError):
        Problem.from_json(tmp_path / "none.json")


@parameterized.expand(
    [
        ("input", [0, 2], {}, "step 2 .*inputs"),
        ("never", [0, 1], {}, "never run"),
        ("twice", [0, 1, 2, 0, 3, 4], {"no_recompute": [0]}, "only once"),
        ("kept", [0, 1, 2, 0, 3, 4], {"keep": [0]}, "to be kept"),
        ("order", [0, 1, 2, 3, 5, 4], {"fixed_order": range(6)}, "another order"),
    ]
)
def test_a_schedule_that_breaks_a_rule_is_found_out(_, runs, options, said):
    count = 6 if "fixed_order" in options else 5
    problem = Problem([1] * count, [8] * count, CHAIN, **options)
    with pytest.raises(PlanError, match=said):
        Schedule(problem, tuple(runs)).verify()


def test_outputs_stay():
    problem = Problem([1] * 5, [8] * 5, CHAIN, outputs=[1, 4])
    schedule = Schedule(problem, (0, 1, 2, 3, 4))
    schedule.verify()
    freed = {step.node for step in schedule.steps if step.kind == "free"}
    assert freed == {0, 2, 3}
    assert schedule.held[-1] == 4 * 8  # 0, 1, 3 and 4.


def test_pictures(tmp_path):
    problem = training_chain(6)
    schedule = solve(problem, 5, iterations=2000, workers=1)
    assert schedule.plot(tmp_path / "held.svg").stat().st_size > 1000
    assert "computed again" in (tmp_path / "held.svg").read_text()
    with pytest.raises(PlotError, match="png"):
        schedule.plot(tmp_path / "held.txt")


@parameterized.expand([("numba", "searched"), ("ortools.linear_solver", "bounded")])
def test_a_missing_package_is_named(package, said):
    code = f"""
import sys
sys.modules["{package}"] = None
from geutil.errors import MissingExtraError
from geutil.gradients.planner import solve
from testdata.layered import training_chain
try:
    solve(training_chain(20), 8, iterations=500, workers=1)
except MissingExtraError as error:
    print(error)
"""
    found = run_python("-c", code).stdout.decode()
    assert re.search(rf"{said}.*geutil\[plan\]", found), found
