"""Cuts into stages, against all cuts that there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PlanError
from geutil.pipeline.stage_memory import cut_sequence, lower_largest

numbers = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@given(numbers, st.integers(1, 4), st.data())
def test_no_cut_is_better_where_costs_fall_as_stretches_grow(sizes, stages, data):
    stages = min(stages, len(sizes))
    length = len(sizes)
    drawn = st.lists(st.integers(0, 20), min_size=length + 1, max_size=length + 1)
    crossing, entry = [*data.draw(drawn)[:-1], 0], data.draw(drawn)
    slack = data.draw(st.sampled_from([0.0, 0.1, 0.5]))

    def cost(stage, start, end):
        # What comes in counts as well, so that an earlier start may cost less.
        return sum(sizes[start:end]) + entry[start] * (stages - stage)

    def row(stage, start):
        ends = range(start + 1, length + 1)
        return np.array([cost(stage, start, end) for end in ends], float)

    every = []
    for inner in combinations(range(1, length), stages - 1):
        ends = (*inner, length)
        costs = [cost(s, i, j) for s, (i, j) in enumerate(pairwise((0, *ends)))]
        every.append((max(costs), sum(crossing[e] for e in ends)))
    least = min(largest for largest, _ in every)
    limit = least * (1 + slack)
    cut = cut_sequence(crossing, stages, row, slack=slack)
    assert max(cut.costs) <= limit
    assert cut.traffic == min(t for largest, t in every if largest <= limit)
    start = [length * (s + 1) // stages for s in range(stages)]
    ends, costs = lower_largest(start, cost, cost)
    assert (ends, costs) == lower_largest(start, cost, lambda *_: 0)
    assert list(costs) == [
        cost(s, i, j) for s, (i, j) in enumerate(pairwise((0, *ends)))
    ]
    before = [cost(s, i, j) for s, (i, j) in enumerate(pairwise((0, *start)))]
    assert least <= max(costs) <= max(before)


@pytest.mark.parametrize("stages", [0, 4])
def test_too_many_stages_are_refused(stages):
    with pytest.raises(PlanError, match="ask for 1 to 3"):
        cut_sequence([0, 1, 1, 0], stages, lambda s, i: np.ones(3 - i))
