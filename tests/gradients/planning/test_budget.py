"""The cuts within a budget, against all subsets of the cuts."""

from itertools import chain, combinations, pairwise

import numpy as np
import pytest

from geutil.gradients.planning.cuts import Stretches
from geutil.gradients.planning.least_peak import Terms, cut_within, least_budget

COUNT = 8


def random_stretches(seed):
    """Return stretches of a chain in which each op makes one tensor of random size."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 100, COUNT)
    ahead = random.integers(0, 100, COUNT)
    shape = (COUNT, COUNT)
    held = np.zeros(shape, np.int64)
    for i in range(COUNT):
        for j in range(i + 1, COUNT):
            held[i, j] = sizes[i + 1 : j + 1].sum() + ahead[j]
    kept = np.broadcast_to(sizes, shape).copy()
    kept[:, -1] = 0
    idle = np.where(random.integers(0, 2, COUNT), kept, 0)
    cost = np.where(np.triu(np.ones(shape), 1), random.integers(0, 9, shape), 0)
    return Stretches(np.arange(COUNT), kept, idle, held, 2 * held, cost)


def need(stretches, cuts):
    """Return the bytes that a cutting keeps at the end, and needs at the most."""
    kept = most = 0
    for i, j in pairwise((0, *cuts, COUNT - 1)):
        most = max(most, kept + stretches.in_turn[i, j])
        kept += stretches.kept[i, j]
    return kept, most


def all_cuttings():
    inner = range(1, COUNT - 1)
    return list(
        chain.from_iterable(combinations(inner, n) for n in range(len(inner) + 1))
    )


@pytest.mark.parametrize("seed", range(20))
def test_least_budget_is_that_of_the_best_subset(seed):
    stretches = random_stretches(seed)
    least = min(need(stretches, cuts)[1] for cuts in all_cuttings())
    found = least_budget(Terms(stretches, stretches.in_turn), precision=1e-6)
    assert least <= found <= least + 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slack", [1.0, 1.2, 2.0])
def test_the_cuts_within_a_budget_keep_least(seed, slack):
    stretches = random_stretches(seed)
    stretches.cost[:] = 0
    terms = Terms(stretches, stretches.in_turn)
    budget = int(least_budget(terms) * slack)
    cuts = cut_within(terms, budget)
    kept, most = need(stretches, cuts)
    assert most <= budget
    fits = (need(stretches, cuts) for cuts in all_cuttings())
    assert kept == min(k for k, m in fits if m <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_cuts_fit_into_less(seed):
    stretches = random_stretches(seed)
    least = min(need(stretches, cuts)[1] for cuts in all_cuttings())
    assert cut_within(Terms(stretches, stretches.in_turn), int(least) - 1) is None


def test_of_equal_cuts_the_one_with_less_to_compute():
    kept = np.array([[0, 5, 5, 0], [0, 0, 5, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    held = np.array([[0, 9, 9, 20], [0, 0, 9, 9], [0, 0, 0, 9], [0, 0, 0, 0]])
    cost = np.array([[0, 7, 3, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    stretches = Stretches(np.arange(4), kept, 0 * kept, held, held, cost)
    assert cut_within(Terms(stretches, held), 15) == (2,)
    cost[0, 1:3] = 3, 7
    assert cut_within(Terms(stretches, held), 15) == (1,)


def test_what_the_backward_pass_reads_anyway_is_preferred():
    kept = np.array([[0, 5, 5, 0], [0, 0, 5, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    held = np.array([[0, 9, 9, 20], [0, 0, 9, 9], [0, 0, 0, 9], [0, 0, 0, 0]])
    idle = np.zeros_like(kept)
    idle[0, 1] = 5
    stretches = Stretches(np.arange(4), kept, idle, held, held, 0 * kept)
    assert cut_within(Terms(stretches, held, idle=0.1), 15) == (2,)
