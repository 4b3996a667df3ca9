"""Gradients of opened networks, against those that Keras' own models have."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.model.networks.applications import Network
from tests.model.networks.test_small_models import integers, lstm
from tests.thorough import chosen


def application(name, tmp_path_factory):
    network = Network(name, tmp_path_factory.mktemp("gradients"), lively=False)
    return network.model, network.images


def recurrent(_):
    tf.keras.utils.set_random_seed(0)
    return lstm(), integers(20, 2, 7)


@pytest.fixture(
    scope="module",
    params=chosen(["MobileNetV2", "EfficientNetB0", "lstm"], "lstm"),
)
def network(request, tmp_path_factory):
    """A Keras model, a batch, and the gradients of a loss by Keras alone."""
    if request.param == "lstm":
        model, batch = recurrent(tmp_path_factory)
    else:
        model, batch = application(request.param, tmp_path_factory)

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch, training=False)))
        return tape.gradient(loss, model.trainable_variables)

    return model, batch, [tf.convert_to_tensor(g).numpy() for g in gradients()]


def gradients_of(function, batch, variables):
    with tf.GradientTape() as tape:
        (output,) = function(batch).values()
        loss = tf.reduce_mean(tf.square(output))
    return tape.gradient(loss, variables)


def assert_close(gradients, expected, variables):
    for g, e, v in zip(gradients, expected, variables, strict=True):
        assert g is not None, v.name
        scale = np.abs(e).max()
        np.testing.assert_allclose(
            tf.convert_to_tensor(g), e, rtol=2e-3, atol=2e-4 * scale, err_msg=v.name
        )


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_gradients_through_an_opened_keras_model(network, way):
    model, batch, expected = network
    m = geutil_model.open(model)
    function = m.to_function()
    # The same variables as Keras': what Keras trains is seen here.
    variables = [v.value for v in model.trainable_variables]
    assert {id(v) for v in function.trainable_variables} == {id(v) for v in variables}
    call = gradients_of if way == "eager" else tf.function(gradients_of)
    assert_close(call(function, batch, variables), expected, variables)


def test_gradients_after_saving_and_opening_again(network, tmp_path):
    model, batch, expected = network
    geutil_model.open(model).save(tmp_path / "saved")
    m = geutil_model.open(tmp_path / "saved")
    by_name = {v.name: v for v in m.variables.values() if v.trainable}
    variables = [by_name[v.value.name] for v in model.trainable_variables]
    assert_close(gradients_of(m.to_function(), batch, variables), expected, variables)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    by_name = {v.name: v for v in loaded.trainable_variables}
    variables = [by_name[v.value.name] for v in model.trainable_variables]
    (name,) = m.inputs
    signature = loaded.signatures["serving_default"]

    def call(values):
        return signature(**{name: tf.constant(values)})

    assert_close(gradients_of(call, batch, variables), expected, variables)


def test_steps_reduce_a_loss(network):
    model, batch, _ = network
    m = geutil_model.open(model)
    function = m.to_function()
    variables = function.trainable_variables
    before = [v.numpy() for v in variables]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (output,) = function(batch).values()
            loss = tf.reduce_mean(tf.square(output))
        gradients = tape.gradient(loss, variables)
        norm = tf.linalg.global_norm(gradients)
        for v, g in zip(variables, gradients, strict=True):
            # A step that is to halve the loss if it were linear.
            v.assign_sub(tf.convert_to_tensor(g) * 0.1 * loss / norm**2)
        return loss

    losses = [float(step()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]
    # The Keras model is trained along: the variables are its own.
    assert any(
        not np.array_equal(v.numpy(), b) for v, b in zip(variables, before, strict=True)
    )
    for v, b in zip(variables, before, strict=True):
        v.assign(b)
