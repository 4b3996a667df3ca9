"""Budgets for the chunks of a GPU that is not there, planned for again."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import Budget, gradients, last_report
from geutil.memory import predict

GPU = "GPU:0"
SHAPE = [8, 32, 32, 16]
EQUAL = [16] * 9
# Their chunks leave gaps that no smaller budget avoids.
UNEQUAL = [16, 24, 8, 8, 8, 40, 8, 40]


def filters_of(channels):
    pairs = enumerate(pairwise(channels))
    return [
        tf.Variable(tf.random.stateless_normal([3, 3, a, b], (i, 0)) / 9)
        for i, (a, b) in pairs
    ]


def loss_of(x, filters):
    for w in filters:
        x = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME"))
    return tf.reduce_mean(x * x)


def planned(filters, device=GPU, update=None, budget=0.5):
    @tf.function(autograph=False)
    def step(x):
        loss = loss_of(x, filters)
        slopes = gradients(loss, filters, checkpoints=Budget(budget), device=device)
        return loss, update(filters, slopes) if update else slopes

    return step.get_concrete_function(tf.TensorSpec(SHAPE))


def used_up(filters, slopes):
    for w, slope in zip(filters, slopes, strict=True):
        w.assign_sub(slope)


def clipped(filters, slopes):
    slopes, norm = tf.clip_by_global_norm(slopes, 1e9)
    used_up(filters, slopes)
    return norm


def slopes_by_tape(x, filters):
    with tf.GradientTape() as tape:
        loss = loss_of(x, filters)
    return [slope.numpy() for slope in tape.gradient(loss, filters)]


def assert_trains(traced, filters):
    """Compare a step of rate 1 with GradientTape's gradients."""
    x = tf.random.stateless_normal(SHAPE, (1, 2))
    wanted, before = slopes_by_tape(x, filters), [w.numpy() for w in filters]
    traced(x)
    for w, old, slope in zip(filters, before, wanted, strict=True):
        assert np.abs(slope).max() > 1e-3
        np.testing.assert_allclose(old - w.numpy(), slope, rtol=0, atol=1e-6)


@pytest.mark.parametrize("update", [used_up, clipped])
def test_gaps_that_exceed_a_budget_are_planned_for(update):
    filters = filters_of(EQUAL)
    traced = planned(filters, update=update)
    report = last_report(traced)
    timeline = predict([*traced.graph.outputs, *traced.graph.control_outputs])
    if update is used_up:
        assert report.attempts == 2
        assert report.resident <= report.budget == report.plain_resident // 2
        assert timeline.resident <= report.budget
        assert not report.warnings
        assert "planned 2 times" in str(report)
    assert report.mode == "budget of 50 % of plain gradients"
    assert report.resident == pytest.approx(timeline.resident, rel=0.03)
    assert_trains(traced, filters)


def test_gaps_that_no_plan_avoids_are_named():
    filters = filters_of(UNEQUAL)
    traced = planned(filters, update=used_up)
    report = last_report(traced)
    assert report.attempts == 3
    assert report.peak <= report.budget < report.resident
    (told,) = report.warnings
    assert f"hands out {report.resident:,} bytes in chunks" in told
    assert "the best of 3 plans" in told
    # The report is on the fullest of several orders.
    timeline = predict([*traced.graph.outputs, *traced.graph.control_outputs])
    assert 0.9 * report.resident < timeline.resident <= report.resident
    assert_trains(traced, filters)


def test_returned_gradients_stay_those_of_the_step():
    filters = filters_of(EQUAL)
    traced = planned(filters)
    x = tf.random.stateless_normal(SHAPE, (1, 2))
    for found, wanted in zip(traced(x)[1], slopes_by_tape(x, filters), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_step_without_chunks_is_planned_once():
    report = last_report(planned(filters_of(EQUAL), device="CPU:0", update=used_up))
    assert report.attempts == 1 and report.resident <= report.budget


def test_a_graph_that_was_never_completed_is_let_go():
    filters, graphs = filters_of(EQUAL[:5]), []

    @tf.function(autograph=False)
    def step(x):
        loss = loss_of(x, filters)
        gradients(loss, filters, checkpoints=Budget("80%"), device=GPU)
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        step.get_concrete_function(tf.TensorSpec(SHAPE))
    del step
    gc.collect()
    assert graphs and graphs[0]() is None
