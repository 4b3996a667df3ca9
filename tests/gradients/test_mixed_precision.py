"""Keras' mixed precision with loss scaling, planned for a GPU that is not there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import checkpointed, gradients, last_report
from geutil.memory import predict

GPU = "GPU:0"
POLICIES = ("mixed_bfloat16", "mixed_float16")


@pytest.fixture(params=POLICIES)
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def images():
    make = keras.layers
    layers = [
        layer
        for _ in range(5)
        for layer in (
            make.Conv2D(16, 3, padding="same"),
            make.BatchNormalization(),
            make.ReLU(),
        )
    ]
    ends = [make.GlobalAveragePooling2D(), make.Dense(10, dtype="float32")]
    return keras.Sequential([keras.Input([32, 32, 16]), *layers, *ends])


def rows():
    layers = [keras.layers.Dense(128, "tanh") for _ in range(10)]
    end = keras.layers.Dense(10, dtype="float32")
    return keras.Sequential([keras.Input([128]), *layers, end])


def loss_of(net, x, y):
    return tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(
            y, net(x, training=True), from_logits=True
        )
    )


def scaled_step(net, batch, checkpoints, device):
    """Return a traced step whose loss is scaled, of a rate of 1."""
    variables = net.trainable_variables
    scaling = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=64.0
    )
    scaling.build(variables)

    @tf.function(autograph=False)
    def step(x, y):
        loss = loss_of(net, x, y)
        slopes = gradients(
            scaling.scale_loss(loss),
            [v.value for v in variables],
            checkpoints=checkpoints,
            device=device,
            # All are checked for infinities before any is applied.
            holds_gradients=True,
            order=checkpoints is not None,
        )
        scaling.apply(slopes, variables)
        return loss

    x = tf.TensorSpec([batch, *net.input_shape[1:]])
    return step.get_concrete_function(x, tf.TensorSpec([batch], tf.int32))


@pytest.mark.parametrize(("make", "batch"), [(images, 32), (rows, 1024)])
def test_reports_are_those_of_the_finished_step(policy, make, batch):
    net = make()
    plain = scaled_step(net, batch, None, GPU)
    report = last_report(plain)
    fetches = [*plain.graph.outputs, *plain.graph.control_outputs]
    without = predict(fetches, device=GPU, grappler=False)
    assert without.peak == pytest.approx(report.plain_peak, rel=0.005)
    saving = scaled_step(net, batch, "memory", GPU)
    report = last_report(saving)
    fetches = [*saving.graph.outputs, *saving.graph.control_outputs]
    assert predict(fetches, device=GPU).peak == pytest.approx(report.peak, rel=0.005)
    assert report.peak < 0.6 * report.plain_peak
    assert not report.warnings


def test_steps_with_scaled_losses_train_as_without_checkpoints(policy):
    net = rows()
    start = net.get_weights()
    data = np.random.default_rng(0)
    x = tf.constant(data.normal(size=[64, 128]), tf.float32)
    y = tf.constant(data.integers(10, size=64), tf.int32)
    moved = []
    for checkpoints in (None, "memory"):
        net.set_weights(start)
        scaled_step(net, 64, checkpoints, None)(x, y)
        moved.append([a - b for a, b in zip(net.get_weights(), start, strict=True)])
    for plain, ours in zip(*moved, strict=True):
        assert np.abs(plain).max() > 1e-4
        np.testing.assert_allclose(ours, plain, rtol=0, atol=0.02 * np.abs(plain).max())


def test_fit_with_checkpointed_layers(policy):
    data = np.random.default_rng(0)
    x = data.normal(size=[64, 128]).astype("f")
    y = data.integers(10, size=64)

    def fitted(net):
        optimizer = keras.optimizers.SGD(0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer, loss)
        net.fit(x, y, batch_size=64, epochs=3, verbose=0)
        return net.get_weights()

    plain = rows()
    start = plain.get_weights()
    wanted = fitted(plain)
    net = rows()
    net.set_weights(start)
    ours = fitted(checkpointed(net, device=GPU))
    report = last_report()
    assert report.recomputed and report.peak < 0.8 * report.plain_peak
    # Keras scales losses of float16 by itself.
    assert (policy == "mixed_float16") is hasattr(net.optimizer, "inner_optimizer")
    for found, expected, first in zip(ours, wanted, start, strict=True):
        moved = np.abs(expected - first).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * moved + 1e-6)
