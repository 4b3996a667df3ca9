"""Budgets and plans of steps of which less is kept than their tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import memory
from geutil.errors import PlanError
from geutil.gradients import (
    MIN_CHECKPOINT_SIZE,
    Budget,
    explain,
    gradients,
    last_report,
    plan,
)
from geutil.gradients.encoding_ops import Encoder
from geutil.gradients.encodings import plan_encodings
from geutil.gradients.planning.under_budget import BudgetSearch
from geutil.gradients.selection import AlwaysKept
from geutil.gradients.step import build_step
from geutil.memory.op_costs import op_time


@pytest.fixture(scope="module")
def net():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input([32, 32, 3])])
    for width, layers in ((8, 6), (16, 4), (32, 2)):
        for _ in range(layers):
            net.add(keras.layers.Conv2D(width, 3, padding="same", activation="relu"))
        net.add(keras.layers.MaxPooling2D())
    net.add(keras.layers.Flatten())
    net.add(keras.layers.Dense(10))
    return net


def traced(net, how):
    """Return what `how` makes of loss and variables, and the function."""
    made = []

    @tf.function(autograph=False)
    def train(x):
        loss = tf.reduce_mean(tf.square(net(x, training=True)))
        made.append(how(loss, [v.value for v in net.trainable_variables]))
        return made[-1] if isinstance(made[-1], list) else loss

    function = train.get_concrete_function(tf.TensorSpec([16, 32, 32, 3]))
    return made[-1], function, train


@pytest.fixture(scope="module")
def found(net):
    def found(loss, xs):
        return plan(loss, xs, 0.5, encode="lossless", holds_gradients=True)

    return traced(net, found)[0]


def ran_as_planned(net, found, **options):
    """Check gradients and the peak of a step; return the report and the graph."""

    def encoded(loss, xs):
        return gradients(loss, xs, checkpoints=found, encode="lossless", **options)

    x = np.random.default_rng(0).normal(size=[16, 32, 32, 3]).astype("f")
    _, ours, train = traced(net, encoded)
    report = last_report(ours.graph)
    _, plain, _ = traced(net, tf.gradients)
    for slope, wanted in zip(ours(x), plain(x), strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)
    measured = memory.measure(train, args=[x], steps=1, inter_op_threads=1)
    assert measured.peak <= 1.02 * report.peak
    return report, ours.graph


def test_a_plan_of_an_encoded_step(net, found):
    report, _ = ran_as_planned(net, found, holds_gradients=True)
    assert report.encoded and report.recomputed
    assert report.peak <= 0.5 * report.plain_peak


def test_less_runs_again_where_less_is_kept(net):
    def reports(loss, xs):
        return tuple(
            explain(loss, xs, checkpoints=Budget(0.7), encode=encode)
            for encode in (None, "lossless")
        )

    (whole, encoded), _, _ = traced(net, reports)
    assert (whole.budget, whole.mode) == (encoded.budget, encoded.mode)
    assert encoded.extra_time < whole.extra_time


@pytest.fixture(scope="module")
def pooled():
    """A network of which some tensors are worth a mask, and others run again."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input([32, 32, 3])])
    for _ in range(4):
        for _ in range(2):
            net.add(keras.layers.Conv2D(16, 3, padding="same", activation="relu"))
        net.add(keras.layers.AveragePooling2D(2, 1, "same"))
    net.add(keras.layers.GlobalAveragePooling2D())
    net.add(keras.layers.Dense(10))
    return net


def test_tensors_are_encoded_one_by_one(pooled):
    """Those that nothing runs again for; without them and with all it takes longer."""

    def planned(loss, xs):
        found = plan(loss, xs, 0.5, encode="lossless")
        whole = plan(loss, xs, 0.5)
        all_encoded = Encoder()
        step = build_step(loss, xs)
        encoded = all_encoded.encode(step, plan_encodings(step, MIN_CHECKPOINT_SIZE))
        trial, _ = BudgetSearch(encoded, AlwaysKept(encoded)).within(found.budget)
        again = sum(map(op_time, trial.plan.run_again))
        every = sum(map(op_time, encoded.ops())) + again
        all_encoded.undo()
        extra = every / sum(map(op_time, step.ops())) - 1
        return found, whole, extra

    (found, whole, extra), _, _ = traced(pooled, planned)
    assert 0 < len(found.encoded) < 4
    assert found.extra_time < min(whole.extra_time, extra)
    assert found.bound <= found.extra_time

    report, graph = ran_as_planned(pooled, found)
    assert len(report.encoded) == len(found.encoded)
    assert report.extra_time == found.extra_time
    # The others are read as they are.
    masks = [op for op in graph.get_operations() if op.name.startswith("encoded/")]
    read = [op for op in masks if op.type == "Greater" and op.outputs[0].consumers()]
    assert len(read) == len(found.encoded)


def test_tensors_that_run_again_are_told(pooled):
    report, _, _ = traced(
        pooled,
        lambda loss, xs: explain(loss, xs, checkpoints=Budget(0.5), encode="lossless"),
    )
    said = [
        t for t in report.not_encoded if t.reason == "it runs again, encoded or not"
    ]
    assert len(said) + len(report.encoded) == 4
    assert {t.name for t in said} <= {
        f"{op.name}:0" for op in report.recomputed if op.op_type == "Relu"
    }


@pytest.mark.parametrize("share", [0.02, 0.15])
def test_extra_time_is_what_encoding_takes_as_well(with_skips, share):
    def reports(loss, xs):
        return tuple(
            explain(loss, xs, checkpoints=Budget(extra_time=share), encode=encode)
            for encode in (None, "lossless")
        )

    (whole, encoded), _, _ = traced(with_skips, reports)
    assert encoded.extra_time <= share + 1e-9
    assert encoded.peak <= whole.peak
    assert encoded.mode == whole.mode


@pytest.fixture(scope="module")
def with_skips():
    """A network whose fullest op holds more when what it reads is encoded."""
    keras.utils.set_random_seed(0)

    def twice(y, width):
        for _ in range(2):
            conv = keras.layers.Conv2D(width, 3, padding="same", activation="relu")
            y = conv(y)
        return y

    x = keras.Input([32, 32, 3])
    y, skips = x, []
    for width in (8, 16):
        skips.append(twice(y, width))
        y = keras.layers.MaxPooling2D()(skips[-1])
    y = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(y)
    for width in (16, 8):
        y = keras.layers.Conv2DTranspose(width, 2, 2)(y)
        y = twice(keras.layers.Concatenate()([y, skips.pop()]), width)
    return keras.Model(x, keras.layers.Conv2D(1, 1)(y))


@pytest.mark.parametrize("budget", [0.5, 0.45])
def test_nothing_is_encoded_where_that_costs_more(with_skips, budget):
    def reports(loss, xs):
        return tuple(
            explain(loss, xs, checkpoints=Budget(budget), encode=encode)
            for encode in (None, "lossless")
        )

    (whole, encoded), _, _ = traced(with_skips, reports)
    assert encoded.peak <= budget * encoded.plain_peak
    assert encoded.extra_time <= whole.extra_time
    said = {tensor.reason for tensor in encoded.not_encoded}
    assert not encoded.encoded
    assert "within the budget the step takes less time without encodings" in said


def test_the_plan_of_an_encoded_step_is_not_that_of_the_plain_one(net, found):
    with pytest.raises(PlanError, match="another step"):
        traced(net, lambda loss, xs: gradients(loss, xs, checkpoints=found))


def test_the_plan_of_a_plain_step_serves_where_encodings_are_asked_for(net):
    plain = traced(net, lambda loss, xs: plan(loss, xs, 0.7))[0]
    report, _, _ = traced(
        net, lambda loss, xs: explain(loss, xs, checkpoints=plain, encode="lossless")
    )
    assert not report.encoded
    assert report.peak == plain.peak
