"""Checkpointed functions on two devices: their parts stay where they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_name, checkpointed, last_report
from tests.gradients.apart.test_two_devices import FIRST, SECOND, pytestmark, start
from tests.gradients.wrapped.comparing import assert_same
from tests.gradients.wrapped.test_functions import PLACES
from tests.thorough import crossed

__all__ = ["pytestmark"]

MODES = {
    "inputs": {"checkpoints": "inputs"},
    "memory": {},
    "policy": {"checkpoints": by_name("kept"), "min_checkpoint_size": 0},
}
OFFLOAD = {"offload": True, "offload_device": SECOND}


def variables(devices):
    made = []
    for number in range(4):
        with tf.device(devices[number % len(devices)]):
            made.append(tf.Variable(start(number) / 8))
    return made


@pytest.fixture
def weights():
    return variables([FIRST])


@pytest.fixture
def spread():
    """Return weights that are by turns on one device and on the other."""
    return variables([FIRST, SECOND])


def chain(weights, devices=(FIRST,)):
    def function(x):
        for number, w in enumerate(weights):
            with tf.device(devices[number % len(devices)]):
                x = tf.sin(tf.tanh(tf.identity(x) @ w))
                x = tf.identity(tf.sin(x), name="kept")
        return x

    return function


@pytest.mark.parametrize(("mode", "place"), crossed(MODES, PLACES, together=1))
def test_offloaded_gradients_are_the_plain_ones(mode, place, weights):
    plain = chain(weights)
    wrapped = checkpointed(plain, **MODES[mode], **OFFLOAD)
    with tf.device(FIRST):
        found = PLACES[place](wrapped, weights)(start())
        assert bool(last_report().offloaded) != (place in ("xla", "outside_xla"))
        assert_same(found, PLACES[place](plain, weights)(start()))


# XLA compiles for one device.
@pytest.mark.parametrize(
    ("mode", "place"),
    crossed(MODES, [place for place in PLACES if "xla" not in place], together=1),
)
def test_parts_on_two_devices(mode, place, spread):
    plain = chain(spread, (FIRST, SECOND))
    found = PLACES[place](checkpointed(plain, **MODES[mode]), spread)(start())
    assert last_report().recomputed
    assert_same(found, PLACES[place](plain, spread)(start()))


def graph_of(function, weights):
    step = tf.function(PLACES["eager"](function, weights))
    with tf.device(FIRST):
        return step.get_concrete_function(start()).graph


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_kept_waits_on_the_other_device(prefetch, weights):
    first, second = (
        checkpointed(chain(weights), **MODES["policy"], **OFFLOAD, prefetch=prefetch)
        for _ in range(2)
    )
    graph = graph_of(lambda x: second(first(x)), weights)
    sent = [op for op in graph.get_operations() if op.name.endswith("/away")]
    # What goes into each call, and three of what is kept in it.
    assert len(sent) == 2 * 4
    assert set(last_report().offloaded) <= {op.inputs[0].name for op in sent}
    for op in sent:
        assert op.device.endswith(SECOND)
        (wait,) = op.outputs[0].consumers()
        (back,) = wait.outputs[0].consumers()
        assert back.name.startswith("offloaded/")
        assert back.device == op.inputs[0].device
        assert wait.control_inputs and wait.device.endswith(SECOND)
        # Nothing in the backward pass reads what was sent.
        readers = op.inputs[0].consumers()
        late = [r for r in readers if r.name.startswith(("gradients/", "recomputed/"))]
        assert not late
    ge.verify(graph)


def test_fit_with_a_model_that_is_offloaded():
    def fit(wrap):
        keras.utils.set_random_seed(3)
        block = [
            keras.layers.Dense(32, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        ]
        model = keras.Sequential([*block, keras.layers.Dense(8, "tanh")])
        wrap(model)
        model.compile("sgd", "mse", jit_compile=False)
        values = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        with tf.device(FIRST):
            history = model.fit(values, values, 16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    def wrap(model):
        checkpointed(model, "inputs", min_checkpoint_size=0, **OFFLOAD)

    expected = fit(lambda model: None)
    assert_same(fit(wrap), expected)
    assert last_report().offloaded
