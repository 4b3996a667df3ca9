"""Cuts into stages, against all cuts that there are and OR-Tools."""

from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from geutil.errors import PlanError
from geutil.memory.stage_cuts import cut_graph, cut_sequence

numbers = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def stretches(sizes, surcharge):
    """Return a cost that depends on the stage, as bytes in flight do."""

    def cost(stage, start, end):
        return sum(sizes[start:end]) + surcharge * (5 - stage) * max(sizes[start:end])

    return cost


@given(numbers, st.integers(1, 4), st.integers(0, 2), st.data())
def test_no_cut_of_a_sequence_is_better(sizes, stages, surcharge, data):
    stages = min(stages, len(sizes))
    bytes_ = st.lists(
        st.integers(0, 9), min_size=len(sizes) + 1, max_size=len(sizes) + 1
    )
    crossing = [*data.draw(bytes_)[:-1], 0]
    slack = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    cost = stretches(sizes, surcharge)
    every = []
    for inner in combinations_with_replacement(range(len(sizes) + 1), stages - 1):
        ends = (*inner, len(sizes))
        stretch = enumerate(pairwise((0, *ends)))
        costs = [cost(s, i, j) if i < j else 0 for s, (i, j) in stretch]
        every.append((max(costs), sum(crossing[e] for e in ends)))
    least = min(largest for largest, _ in every)
    fewest = min(t for largest, t in every if largest <= least * (1 + slack))
    cut = cut_sequence(crossing, stages, cost, slack=slack)
    assert cut.least == least
    assert cut.largest <= least * (1 + slack)
    assert cut.traffic == fewest
    assert (cut.largest, cut.traffic) in every


@st.composite
def graphs(draw, most=7):
    count = draw(st.integers(1, most))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = [pair for pair in pairs if draw(st.integers(0, 2)) == 0]
    each = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    return draw(each), draw(each), edges


def measured(weights, sizes, edges, stage_of, stages):
    """Return the largest stage and the traffic of an assignment; None if it is none."""
    if len(set(stage_of)) < stages or any(stage_of[i] > stage_of[j] for i, j in edges):
        return None
    costs = [0] * stages
    for weight, stage in zip(weights, stage_of, strict=True):
        costs[stage] += weight
    last = list(stage_of)
    for i, j in edges:
        last[i] = max(last[i], stage_of[j])
    spans = (end - stage for stage, end in zip(stage_of, last, strict=True))
    return max(costs), sum(s * n for s, n in zip(sizes, spans, strict=True))


@settings(max_examples=50)
@given(graphs(), st.integers(1, 3), st.sampled_from([0.0, 0.3]))
def test_no_cut_of_a_graph_is_better(graph, stages, slack):
    weights, sizes, edges = graph
    stages = min(stages, len(weights))
    every = [
        found
        for stage_of in product(range(stages), repeat=len(weights))
        if (found := measured(*graph, stage_of, stages))
    ]
    least = min(largest for largest, _ in every)
    fewest = min(t for largest, t in every if largest <= least * (1 + slack))
    cut = cut_graph(weights, sizes, edges, stages, slack=slack)
    assert measured(*graph, cut.stages, stages) == (max(cut.costs), cut.traffic)
    assert max(cut.costs) <= least * (1 + slack) + 1e-6
    assert cut.traffic == fewest


def solved(weights, edges, stages):
    """Return the least largest stage, by a mixed integer program."""
    solver = pywraplp.Solver.CreateSolver("SCIP")
    largest = solver.NumVar(0, sum(weights), "")
    is_in = [[solver.BoolVar("") for _ in range(stages)] for _ in weights]
    number = [sum(s * b for s, b in enumerate(row)) for row in is_in]
    for row in is_in:
        solver.Add(sum(row) == 1)
    for i, j in edges:
        solver.Add(number[i] <= number[j])
    for stage in range(stages):
        solver.Add(sum(row[stage] for row in is_in) >= 1)
        held = [w * row[stage] for w, row in zip(weights, is_in, strict=True)]
        solver.Add(sum(held) <= largest)
    solver.Minimize(largest)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return solver.Objective().Value()


@settings(max_examples=10, deadline=None)
@given(graphs(most=10), st.integers(2, 4))
def test_ortools_finds_no_better_cut(graph, stages):
    weights, sizes, edges = graph
    stages = min(stages, len(weights))
    cut = cut_graph(weights, sizes, edges, stages, slack=0)
    assert max(cut.costs) == pytest.approx(solved(weights, edges, stages))


def test_a_wide_graph_is_left_to_others():
    assert cut_graph([1] * 20, [1] * 20, [], 2) is None
    chain = [(i, i + 1) for i in range(99)]
    assert cut_graph([1] * 100, [1] * 100, chain, 2) is None


@pytest.mark.parametrize("stages", [0, 4])
def test_too_many_stages_are_refused(stages):
    with pytest.raises(PlanError, match="ask for 1 to 3"):
        cut_sequence([0, 1, 1, 0], stages, lambda s, i, j: j - i)
    with pytest.raises(PlanError, match="ask for 1 to 3"):
        cut_graph([1, 1, 1], [1, 1, 1], [], stages)
