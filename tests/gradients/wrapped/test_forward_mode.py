"""Forward mode through checkpointed calls has the values of plain ones."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import checkpointed
from tests.thorough import chosen

X, T = tf.constant([0.1, 0.2, 0.3]), tf.constant([1.0, 2.0, 3.0])


def jvp(function):
    with tf.autodiff.ForwardAccumulator(X, T) as forward:
        y = function(X)
    return forward.jvp(y)


def forward_over_reverse(function):
    with tf.autodiff.ForwardAccumulator(X, T) as forward:
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tf.reduce_sum(tf.square(function(X)))
        slope = tape.gradient(y, X)
    return forward.jvp(slope)


def reverse_over_forward(function):
    with tf.GradientTape() as tape:
        tape.watch(X)
        with tf.autodiff.ForwardAccumulator(X, T) as forward:
            y = tf.reduce_sum(tf.square(function(X)))
        slope = forward.jvp(y)
    return tape.gradient(slope, X)


def waves(x):
    for _ in range(6):
        x = tf.sin(tf.exp(tf.sin(x))) * 2.0
    return x


@pytest.fixture(scope="module")
def pairs():
    plain, saving = (keras.layers.Dense(3, "tanh") for _ in range(2))
    for layer in (plain, saving):
        layer.build((None, 3))
    saving.set_weights(plain.get_weights())
    checkpointed(saving, "inputs")
    return [
        (waves, checkpointed(waves, "inputs", min_checkpoint_size=1)),
        (lambda x: plain(x[None])[0], lambda x: saving(x[None])[0]),
        (plain, saving),
    ]


def called(form, function):
    return form(function)


def in_a_function(form, function):
    return tf.function(lambda: form(function), autograph=False)()


def of_a_function(form, function):
    return form(tf.function(function, autograph=False))


@pytest.mark.parametrize(
    "how", chosen([called, in_a_function, of_a_function], called, in_a_function)
)
@pytest.mark.parametrize("form", [jvp, forward_over_reverse, reverse_over_forward])
def test_values_are_those_of_plain_calls(form, how, pairs):
    for plain, saving in pairs[:2]:
        np.testing.assert_allclose(how(form, saving), how(form, plain), rtol=1e-4)


@pytest.mark.parametrize("how", [called, in_a_function])
def test_weights_are_followed_and_it_is_said(how, pairs, caplog):
    def of_kernel(layer):
        kernel = layer.kernel.value
        with tf.autodiff.ForwardAccumulator(kernel, tf.ones_like(kernel)) as forward:
            y = layer(X[None])
        return forward.jvp(y)

    plain, saving = pairs[2]
    with caplog.at_level(logging.WARNING, "geutil"):
        found = how(of_kernel, saving)
    np.testing.assert_allclose(found, how(of_kernel, plain), rtol=1e-5)
    assert "there is no forward mode to save memory for" in caplog.text
