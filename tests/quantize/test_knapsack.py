"""The knapsack against every choice that there is."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameterized import parameterized

from geutil.errors import MissingExtraError
from geutil.quantize.bits.knapsack import least_noise, least_size

WHOLE = st.integers(0, 10**8)
NOISE = st.floats(-1.0, 1e3, allow_nan=False)
# In quarters, whose sums are exact: a limit is kept or not, and nothing between.
QUARTERS = st.integers(-8, 4000).map(lambda n: n / 4)


def items(noise):
    options = st.lists(st.tuples(WHOLE, noise), min_size=1, max_size=3)
    return st.lists(options, min_size=1, max_size=5)


def tables(drawn):
    """Return the sizes and the noises of options."""
    return tuple([[pair[i] for pair in row] for row in drawn] for i in range(2))


def totals(table, choices):
    return [sum(row[i] for row, i in zip(table, c, strict=True)) for c in choices]


def every_choice(sizes):
    return list(itertools.product(*(range(len(row)) for row in sizes)))


@given(items(NOISE), st.floats(0, 1))
def test_least_noise_is_that_of_the_best_choice(drawn, share):
    sizes, noises = tables(drawn)
    choices = every_choice(sizes)
    budget = int(share * sum(map(max, sizes)))
    fitting = [
        noise
        for size, noise in zip(
            totals(sizes, choices), totals(noises, choices), strict=True
        )
        if size <= budget
    ]
    chosen = least_noise(sizes, noises, budget)
    if not fitting:
        assert chosen is None
        return
    assert totals(sizes, [chosen])[0] <= budget
    largest = max(abs(noise) for row in noises for noise in row)
    # The solver's optimum is one of float64.
    assert totals(noises, [chosen])[0] <= min(fitting) + 1e-9 * largest


@given(items(QUARTERS), st.integers(-50, 10_000).map(lambda n: n / 4))
def test_least_size_is_that_of_the_best_choice(drawn, limit):
    sizes, noises = tables(drawn)
    choices = every_choice(sizes)
    pairs = list(zip(totals(sizes, choices), totals(noises, choices), strict=True))
    quiet = [size for size, noise in pairs if noise <= limit]
    chosen = least_size(sizes, noises, limit)
    if not quiet:
        assert chosen is None
        return
    assert totals(noises, [chosen])[0] <= limit
    # Shares of the largest size: a byte of a hundred million is told.
    assert totals(sizes, [chosen])[0] == min(quiet)
    ties = [noise for size, noise in pairs if size == min(quiet)]
    assert totals(noises, [chosen])[0] == min(ties)


def test_a_budget_is_kept_to_the_byte():
    """What fits by all but one byte of a billion does not fit."""
    sizes = [[10**9, 10**9 + 1], [10**9 - 1, 10**9]]
    noises = [[1.0, 0.0], [1.0, 0.5]]
    assert least_noise(sizes, noises, 2 * 10**9 + 1) == [1, 1]
    assert least_noise(sizes, noises, 2 * 10**9) == [1, 0]
    assert least_noise(sizes, noises, 2 * 10**9 - 1) == [0, 0]
    assert least_noise(sizes, noises, 2 * 10**9 - 2) is None


def test_hundreds_of_items():
    """Of the same size, so that those are chosen that make the most noise."""
    noises = [[1.0 + n % 7, 0.0] for n in range(300)]
    chosen = least_noise([[1, 2]] * 300, noises, 400)
    wanted = sorted(row[0] for row in noises)[:200]
    assert totals(noises, [chosen]) == [sum(wanted)]
    assert sum(chosen) == 100


@parameterized.expand([(least_noise, 3), (least_size, 3.0)])
def test_without_ortools_the_extra_is_named(solve, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ortools.linear_solver", None)
        with pytest.raises(MissingExtraError, match=r"OR-Tools.*geutil\[plan\]"):
            solve([[1, 2], [1, 2]], [[2.0, 1.0], [2.0, 1.0]], budget)
