"""Gradients of `tf.custom_gradient` in models that were edited."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import quantize

_random = np.random.default_rng(5)
IMAGES = _random.normal(size=(2, 6, 6, 3)).astype(np.float32)


def _layer():
    """Return a convolution followed by a batch norm, with random statistics."""
    w = tf.Variable(_random.normal(size=(3, 3, 3, 4)).astype(np.float32))
    mean, offset = (tf.Variable(_random.normal(size=4)) for _ in range(2))
    variance, scale = (tf.Variable(_random.uniform(0.5, 2, size=4)) for _ in range(2))
    numbers = [tf.cast(v, tf.float32) for v in (mean, variance, offset, scale)]

    def layer(x):
        y = tf.nn.conv2d(x, w, 1, "SAME")
        return tf.nn.batch_normalization(y, *numbers, 1e-3)

    return layer


def swish(x):
    return tf.nn.silu(x)


@tf.custom_gradient
def reading_its_result(x):
    y = tf.exp(x / 4)
    return y, lambda dy: 3 * dy * y


@tf.custom_gradient
def reading_a_hidden_tensor(x):
    hidden = tf.exp(-tf.abs(x), name="hidden")
    return 2 * x, lambda dy: dy * hidden


def reading_the_norm(x):
    @tf.custom_gradient
    def function(y):
        return tf.tanh(y), lambda dy: dy * x

    return function(tf.nn.relu(x))


def nested(x):
    @tf.custom_gradient
    def function(y):
        return y * 2, lambda dy: dy * tf.nn.silu(reading_its_result(y))

    return function(x)


FUNCTIONS = [
    swish,
    reading_its_result,
    reading_a_hidden_tensor,
    reading_the_norm,
    nested,
]


def opened(function):
    layer = _layer()
    traced = tf.function(
        lambda x: {"y": function(layer(x))},
        input_signature=[tf.TensorSpec([None, 6, 6, 3], name="x")],
        autograph=False,
    )
    return traced, model.open(traced)


def derivative(function, images=IMAGES):
    x = tf.constant(images)
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = function(x=x).values()
        loss = tf.reduce_sum(y**2)
    return tape.gradient(loss, x).numpy()


def saved_and_loaded(m, path):
    m.save(path)
    loaded = tf.saved_model.load(str(path))

    def function(x):  # It keeps the variables alive.
        return loaded.signatures["serving_default"](x=x)

    return function


def assert_near(found, expected):
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_folded_model_differentiates_also_once_loaded(function, tmp_path):
    traced, m = opened(function)
    assert len(fold_batch_norms(m).folded) == 1
    expected = derivative(traced)
    assert_near(derivative(m.to_function()), expected)
    loaded = saved_and_loaded(m, tmp_path / "folded")
    assert_near(derivative(loaded), expected)
    again = model.open(tmp_path / "folded")
    assert_near(derivative(again.to_function()), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unedited_model_differentiates_also_once_loaded(function, tmp_path):
    traced, m = opened(function)
    expected = derivative(traced)
    assert_near(derivative(m.to_function()), expected)
    assert_near(derivative(saved_and_loaded(m, tmp_path / "m")), expected)


def test_a_quantized_model_saves_and_differentiates(tmp_path):
    traced, m = opened(swish)
    fold_batch_norms(m)
    quantize(m, is_training=False)
    m.run(x=IMAGES)
    found = derivative(saved_and_loaded(m, tmp_path / "m"))
    np.testing.assert_array_equal(found, derivative(m.to_function()))


def test_the_gradient_of_a_rerouted_model_is_at_the_new_tensor(tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        return {"y": reading_its_result(tf.multiply(x, 2.0, name="twice"))}

    m = model.open(function)
    twice = m.graph.get_tensor_by_name("twice:0")
    with m.graph.as_default():
        thrice = tf.multiply(m.inputs["x"], 3.0)
    ge.reroute_ts(thrice, twice)
    # y = exp(3 x / 4), differentiated as 3 y for each of the 3 x.
    expected = 9 * np.exp(1.5) * 2 * np.exp(1.5)
    for f in (m.to_function(), saved_and_loaded(m, tmp_path / "m")):
        assert_near(derivative(f, np.float32(2.0)), expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_models_made_of_a_folded_model(frozen, tmp_path):
    traced, m = opened(swish)
    fold_batch_norms(m)
    m = m.replace_op("Sigmoid", lambda x: 1 / (1 + tf.exp(-x)))
    m = m.set_batch_size(len(IMAGES))
    m = m.freeze() if frozen else m
    expected = derivative(traced)
    assert_near(derivative(m.to_function()), expected)
    assert_near(derivative(saved_and_loaded(m, tmp_path / "m")), expected)


def test_what_only_a_gradient_reads_needs_no_input_that_was_cut_off():
    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        hidden = tf.exp(x)

        @tf.custom_gradient
        def odd(y):
            return y * 2, lambda dy: dy * hidden

        return {"y": odd(tf.negative(x, name="negative"))}

    part = model.open(function).cut(inputs={"n": "negative"})
    assert part.run(n=3.0)["y"] == 6.0
    with pytest.raises(ge.TransformError, match="'Exp:0', which was not copied"):
        derivative(lambda x: part.to_function()(n=x), np.float32(1.0))


def rows_of(x, f):
    return tf.map_fn(f, x)


def while_positive(x, f):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, f(y)), [0, x])[1]


BODIES = {
    "map_fn": rows_of,
    "while": while_positive,
    "cond": lambda x, f: tf.cond(tf.reduce_sum(x) > -1e3, lambda: f(x), lambda: x),
    "map_fn in cond": lambda x, f: tf.cond(
        tf.reduce_sum(x) > -1e3, lambda: rows_of(x, f), lambda: x
    ),
    "compiled": lambda x, f: tf.function(f, jit_compile=True)(x),
}
ROWS = _random.normal(size=(3, 5, 2)).astype(np.float32)


def _slope(call):
    x = tf.constant(ROWS)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(call(x) ** 2)
    return tape.gradient(loss, x).numpy()


def _in_body(kind, f):
    call = tf.function(
        lambda x: {"y": BODIES[kind](tf.sin(x), f)},
        [tf.TensorSpec([None, 5, 2], name="x")],
        autograph=False,
    )
    return call, model.open(call)


@pytest.mark.parametrize("f", [swish, reading_its_result], ids=["swish", "result"])
@pytest.mark.parametrize("kind", BODIES)
def test_gradients_in_the_bodies_of_functions(kind, f, tmp_path):
    call, m = _in_body(kind, f)
    run = m.to_function()
    found = _slope(lambda x: run(x=x)["y"])
    # TensorFlow itself cannot differentiate a conditional of a swish, nor a loop once
    # it was loaded.
    if (kind, f) != ("cond", swish):
        np.testing.assert_allclose(found, _slope(lambda x: call(x)["y"]), rtol=1e-5)
    expected = call(tf.constant(ROWS))["y"]
    m.save(tmp_path / "m")
    again = model.open(tmp_path / "m")
    if kind != "cond":
        again.save(tmp_path / "again")
        loaded = tf.saved_model.load(str(tmp_path / "again"))
        signature = loaded.signatures["serving_default"]
        np.testing.assert_array_equal(signature(x=tf.constant(ROWS))["y"], expected)
        if kind == "compiled":
            slope = _slope(lambda x: signature(x=x)["y"])
            np.testing.assert_allclose(slope, found, rtol=1e-6)
    np.testing.assert_array_equal(again.run(x=ROWS)["y"], expected)


def test_a_recurrent_layer_with_a_swish_is_folded_saved_and_differentiated(tmp_path):
    layers = tf.keras.layers
    network = tf.keras.Sequential(
        [
            layers.Input([5, 2]),
            layers.Conv1D(3, 2),
            layers.BatchNormalization(),
            layers.GRU(4, activation="swish"),
        ]
    )
    call = tf.function(lambda x: network(x, training=False))
    m = model.open(network)
    fold_batch_norms(m)
    (name,) = m.inputs
    run = m.to_function()
    found = _slope(lambda x: next(iter(run(**{name: x}).values())))
    np.testing.assert_allclose(found, _slope(call), rtol=1e-4, atol=1e-6)
    m.save(tmp_path / "m")
    again = model.open(tmp_path / "m").run(**{name: ROWS})
    np.testing.assert_allclose(*again.values(), call(ROWS), rtol=1e-4, atol=1e-6)
