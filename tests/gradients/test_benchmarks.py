"""The harness that measures training steps."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.gradients.cases import CASES, DEFAULT, Case
from benchmarks.gradients.child import ChildError, in_a_child
from benchmarks.gradients.peaks import Peak
from benchmarks.gradients.rows import Outcome, StepRow
from benchmarks.gradients.ways import RATE, WAYS, Way, traced
from benchmarks.networks import NETWORKS
from tests.gradients.networks import SMALL, small_step
from tests.thorough import thorough

CASE = Case("chain", "", DEFAULT, 0.5, 1.4)
MB = 10**6


def row(ours, plain):
    return StepRow(CASE, {"plain": plain, "memory": ours})


def outcome(allocator, steady, seconds):
    return Outcome(Peak(allocator, 2 * steady, steady), seconds)


def test_the_ratios_are_to_plain():
    found = row(outcome(30 * MB, 40 * MB, 1.2), outcome(100 * MB, 50 * MB, 1.0))
    assert found.peak_ratio("memory") == pytest.approx(0.3)
    assert found.resident_ratio("memory") == pytest.approx(0.8)
    assert found.time_ratio("memory") == pytest.approx(1.2)
    assert found.ok


def test_without_statistics_the_resident_memory_of_a_later_step_counts():
    found = row(outcome(None, 40 * MB, 1.2), outcome(None, 100 * MB, 1.0))
    assert found.peak_ratio("memory") == pytest.approx(0.4)


@pytest.mark.parametrize(
    "ours",
    [
        outcome(51 * MB, MB, 1.2),
        outcome(50 * MB, MB, 1.5),
        Outcome(Peak(MB, MB, MB)),
        Outcome(raised=("ValueError: no",)),
    ],
)
def test_a_row_misses_its_limits(ours):
    assert not row(ours, outcome(100 * MB, MB, 1.0)).ok


def test_nothing_is_reached_without_a_baseline():
    assert not row(outcome(MB, MB, 1.0), Outcome()).ok


def test_all_names_exist():
    assert {case.network for case in CASES} == set(NETWORKS)
    assert {peer for case in CASES for peer in case.peers} < set(WAYS)


@pytest.mark.parametrize("way", ["plain", "memory", "recompute_grad"])
def test_each_way_makes_the_same_step(way):
    step = WAYS[way].make(lambda **wrap: NETWORKS["chain"](**SMALL["chain"], **wrap))
    with tf.GradientTape() as tape:
        loss = step.loss(*step.tensors())
    expected = tape.gradient(loss, step.variables)
    before = [variable.numpy() for variable in step.variables]
    traced(WAYS[way], step, DEFAULT)(*step.tensors())
    for old, variable, reference in zip(before, step.variables, expected, strict=True):
        # The reference is moved as the step moves the variable, rounding included.
        moved = old - np.float32(RATE) * reference.numpy()
        np.testing.assert_allclose(variable, moved, rtol=0, atol=1e-9)


def test_a_way_that_forgets_a_variable_is_no_way():
    way = Way(gradients=lambda loss, xs: [None, *tf.gradients(loss, xs[1:])])
    with pytest.raises(ValueError, match="1 of 12 gradients are None"):
        traced(way, small_step("chain"), DEFAULT)


@thorough
def test_what_a_child_raises_is_told():
    with pytest.raises(ChildError, match=r"^KeyError: 'no such way'$"):
        in_a_child("peak", "chain", DEFAULT, "no such way")
