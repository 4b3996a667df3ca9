"""Gradients of `tf.custom_gradient` in models that were edited."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import quantize
from tests.model.body_samples import slopes

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


BODIES = {
    "while": lambda x, f: tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, f(y)), [0, x]
    )[1],
    "cond": lambda x, f: tf.cond(tf.reduce_sum(x) > -1e3, lambda: f(x), lambda: x),
    "map_fn_in_cond": lambda x, f: tf.cond(
        tf.reduce_sum(x) > -1e3, lambda: tf.map_fn(f, x), lambda: x
    ),
    "compiled": lambda x, f: tf.function(f, jit_compile=True)(x),
}
FUNCTIONS = [
    swish,
    reading_its_result,
    reading_a_hidden_tensor,
    reading_the_norm,
    nested,
]


def in_body(kind, function):
    return lambda x: BODIES[kind](tf.sin(x), function)


def traced(parts):
    """Return a function with an input and an output of the same name for each."""

    def body(*inputs):
        pairs = zip(parts.items(), inputs, strict=True)
        return {name: function(x) for (name, function), x in pairs}

    specs = [tf.TensorSpec([None, 6, 6, 3], name=name) for name in parts]
    return tf.function(body, specs, autograph=False).get_concrete_function()


def behind_layer(function):
    layer = _layer()
    return lambda x: function(layer(x))


def behind_layers(functions):
    return {name: behind_layer(function) for name, function in functions.items()}


def saved_and_loaded(m, path):
    m.save(path)
    loaded = tf.saved_model.load(str(path))

    def function(**inputs):  # It keeps the variables alive.
        return loaded.signatures["serving_default"](**inputs)

    return function


def assert_near(found, expected):
    errors = {
        name: np.abs(found[name] - value).max() / np.abs(value).max()
        for name, value in expected.items()
    }
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


DIFFERENTIATED = {f.__name__: f for f in FUNCTIONS}
DIFFERENTIATED["compiled"] = in_body("compiled", reading_its_result)
LOOPS = {
    "loop": in_body("while", reading_its_result),
    "map_fn_in_cond": in_body("map_fn_in_cond", swish),
}
CONDITIONALS = {
    "swish_in_cond": in_body("cond", swish),
    "reading_in_cond": in_body("cond", reading_its_result),
}


@pytest.mark.parametrize(
    ("functions", "tensorflow_can"),
    # TensorFlow itself cannot differentiate a loop once it was loaded, nor a
    # conditional of a swish.
    [(DIFFERENTIATED, "differentiate"), (LOOPS, "run"), (CONDITIONALS, "load")],
    ids=["plain", "loops", "cond"],
)
def test_models_differentiate_also_once_folded_and_once_loaded(
    functions, tensorflow_can, tmp_path
):
    parts = behind_layers(functions)
    inputs = dict.fromkeys(parts, tf.constant(IMAGES))
    m = model.open(traced(parts))
    values = traced(parts)(**inputs)
    known = {name: f for name, f in parts.items() if name != "swish_in_cond"}
    expected = slopes(traced(known), dict.fromkeys(known, IMAGES))
    for state in ("unedited", "folded"):
        if state == "folded":
            assert len(fold_batch_norms(m).folded) == len(parts)
            values = m.run(**inputs)
        loaded = saved_and_loaded(m, tmp_path / state)
        functions = [m.to_function()]
        if state == "folded":
            functions.append(model.open(tmp_path / state).to_function())
        functions += [loaded] * (tensorflow_can == "differentiate")
        for function in functions:
            assert_near(slopes(function, inputs), expected)
        functions += [loaded] * (tensorflow_can == "run")
        for function in functions:
            for name, value in function(**inputs).items():
                np.testing.assert_array_equal(value, values[name], err_msg=name)


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
        assert_near(slopes(f, {"x": 2.0}), {"x": expected})


def test_models_made_of_a_folded_model(tmp_path):
    parts = behind_layers({"swish": swish})
    m = model.open(traced(parts))
    fold_batch_norms(m)
    m = m.replace_op("Sigmoid", lambda x: 1 / (1 + tf.exp(-x)))
    m = m.set_batch_size(len(IMAGES))
    inputs = {"swish": IMAGES}
    expected = slopes(traced(parts), inputs)
    for name, made in (("variables", m), ("frozen", m.freeze())):
        for f in (made.to_function(), saved_and_loaded(made, tmp_path / name)):
            assert_near(slopes(f, inputs), expected)
    quantize(m, is_training=False)
    m.run(**inputs)
    found = slopes(saved_and_loaded(m, tmp_path / "quantized"), inputs)
    expected = slopes(m.to_function(), inputs)
    np.testing.assert_array_equal(found["swish"], expected["swish"])


def test_what_only_a_gradient_reads_needs_no_input_that_was_cut_off():
    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        hidden = tf.exp(x)

        @tf.custom_gradient
        def odd(y):
            return y * 2, lambda dy: dy * hidden

        negative = tf.negative(x, name="negative")
        return {"y": odd(negative), "z": reading_its_result(negative)}

    part = model.open(function).cut(inputs={"n": "negative"})
    assert part.run(n=3.0)["y"] == 6.0
    with pytest.raises(ge.TransformError, match="'Exp:0', which was not copied"):
        slopes(part.to_function(), {"n": 1.0})
    # z = exp(n / 4), differentiated as 3 z; of its square.
    part = part.cut(outputs=["z"])
    found = slopes(part.to_function(), {"n": 1.0})
    assert_near(found, {"n": 6 * np.exp(0.5)})
