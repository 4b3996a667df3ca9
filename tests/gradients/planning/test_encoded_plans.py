"""Budgets and plans of steps of which less is kept than their tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import memory
from geutil.errors import PlanError
from geutil.gradients import Budget, explain, gradients, last_report, plan


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


def test_a_plan_of_an_encoded_step(net, found):
    def encoded(loss, xs):
        return gradients(
            loss, xs, checkpoints=found, encode="lossless", holds_gradients=True
        )

    x = np.random.default_rng(0).normal(size=[16, 32, 32, 3]).astype("f")
    _, ours, train = traced(net, encoded)
    report = last_report(ours.graph)
    assert report.encoded and report.recomputed
    assert report.peak <= 0.5 * report.plain_peak
    _, plain, _ = traced(net, tf.gradients)
    for slope, wanted in zip(ours(x), plain(x), strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)
    measured = memory.measure(train, args=[x], steps=1, inter_op_threads=1)
    assert measured.peak <= 1.02 * report.peak


def test_less_runs_again_where_less_is_kept(net):
    def reports(loss, xs):
        return tuple(
            explain(loss, xs, checkpoints=Budget(0.7), encode=encode)
            for encode in (None, "lossless")
        )

    (whole, encoded), _, _ = traced(net, reports)
    assert whole.budget == encoded.budget
    assert encoded.extra_time < whole.extra_time


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
