"""Checkpointed functions hold less, as TensorFlow's allocator counts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import by_name, checkpointed
from tests.gradients.graphs import chain_weights
from tests.gradients.wrapped.comparing import needs_statistics, peak_bytes
from tests.thorough import crossed

pytestmark = needs_statistics
BLOCKS, LAYERS, WIDTH = 6, 5, 128
X = np.random.default_rng(0).normal(size=(1024, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def weights():
    return chain_weights(BLOCKS * LAYERS, WIDTH)


def block(weights):
    def function(x):
        for w in weights:
            x = tf.tanh(x @ w)
        return tf.identity(x, name="block")

    return function


def chain(weights, wrap):
    blocks = [
        wrap(block(weights[i : i + LAYERS])) for i in range(0, len(weights), LAYERS)
    ]

    def function(x):
        for call in blocks:
            x = call(x)
        return x

    return function


def gradients_of(function, weights):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        return [tf.reduce_sum(g) for g in tape.gradient(loss, weights)]

    return step


# Under XLA: apart/test_peaks_under_xla.py.
PLACES = {
    "function": lambda f, w: tf.function(gradients_of(f, w)),
    "eager": gradients_of,
    "outside": lambda f, w: gradients_of(tf.function(f), w),
}


def plain(weights):
    return chain(weights, lambda f: f)


WRAPPED = {
    "blocks": lambda w: chain(w, lambda f: checkpointed(f, "inputs")),
    "blocks by default": lambda w: chain(w, checkpointed),
    "all": lambda w: checkpointed(plain(w), by_name("block")),
}


@pytest.mark.parametrize(("wrapped", "place"), crossed(WRAPPED, PLACES, together=1))
def test_the_peak_falls(wrapped, place, weights):
    whole = PLACES[place](plain(weights), weights)
    saving = PLACES[place](WRAPPED[wrapped](weights), weights)
    x = tf.constant(X)
    assert peak_bytes(lambda: saving(x)) < 0.55 * peak_bytes(lambda: whole(x))


def looped(function):
    return lambda x: tf.while_loop(
        lambda i, _: i < BLOCKS, lambda i, x: (i + 1, function(x)), (tf.constant(0), x)
    )[1]


@pytest.mark.parametrize("place", ["function", "outside"])
def test_the_peak_of_a_loop_falls(place, weights):
    plain, x = block(weights[:LAYERS]), tf.constant(X)
    peaks = []
    for function in (plain, checkpointed(plain, "inputs")):
        step = PLACES[place](looped(function), weights[:LAYERS])
        peaks.append(peak_bytes(lambda step=step: step(x)))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.fixture
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("policy", "wrapped"),
    crossed(["float32", "mixed_bfloat16"], ["layers", "model"], together=1),
    indirect=["policy"],
)
def test_the_peak_of_fit_falls(policy, wrapped):
    def peak(wrap):
        model = keras.Sequential(
            keras.Sequential(
                [keras.layers.Dense(WIDTH, "tanh", name=f"d{i}") for i in range(LAYERS)]
            )
            for _ in range(BLOCKS)
        )
        model.build(X.shape)
        wrap(model)
        model.compile("sgd", "mse", jit_compile=False)
        return peak_bytes(lambda: model.train_on_batch(X, X))

    def wrap(model):
        if wrapped == "model":
            checkpointed(model, by_name(f"d{LAYERS - 1}.*/Tanh"))
        for block in model.layers:
            checkpointed(block, "inputs")

    assert peak(wrap) < 0.6 * peak(lambda _: None)
