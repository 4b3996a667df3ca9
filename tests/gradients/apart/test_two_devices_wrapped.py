"""Checkpointed functions on two devices: their parts stay where they are."""

import pytest
import tensorflow as tf

from geutil.gradients import by_name, checkpointed, last_report
from tests.gradients.apart.test_two_devices import (
    FIRST,
    SECOND,
    journeys,
    pytestmark,
    start,
)
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


def variables(devices=(FIRST,)):
    """Return weights that are by turns on the one device and on the other."""
    made = []
    for number in range(4):
        with tf.device(devices[number % len(devices)]):
            made.append(tf.Variable(start(number) / 8))
    return made


def chain(weights, devices=(FIRST,)):
    def function(x):
        for number, w in enumerate(weights):
            with tf.device(devices[number % len(devices)]):
                x = tf.sin(tf.tanh(tf.identity(x) @ w))
                x = tf.identity(tf.sin(x), name="kept")
        return x

    return function


@pytest.mark.parametrize(("mode", "place"), crossed(MODES, PLACES, together=1))
def test_offloaded_gradients_are_the_plain_ones(mode, place):
    weights = variables()
    with tf.device(FIRST):
        report = assert_as_plain(chain(weights), weights, place, mode, **OFFLOAD)
    assert bool(report.offloaded) != (place in ("xla", "outside_xla"))


def assert_as_plain(plain, weights, place, mode, **options):
    """Compare gradients of a function with those of its wrapping; return the report."""
    wrapped = checkpointed(plain, **MODES[mode], **options)
    found = PLACES[place](wrapped, weights)(start())
    report = last_report()
    assert_same(found, PLACES[place](plain, weights)(start()))
    return report


# XLA compiles for one device.
@pytest.mark.parametrize(
    ("mode", "place"),
    crossed(MODES, [place for place in PLACES if "xla" not in place], together=1),
)
def test_parts_on_two_devices(mode, place):
    devices = FIRST, SECOND
    spread = variables(devices)
    assert assert_as_plain(chain(spread, devices), spread, place, mode).recomputed


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_kept_waits_on_the_other_device(prefetch):
    weights = variables()
    first, second = (
        checkpointed(chain(weights), **MODES["policy"], **OFFLOAD, prefetch=prefetch)
        for _ in range(2)
    )
    step = tf.function(PLACES["eager"](lambda x: second(first(x)), weights))
    with tf.device(FIRST):
        graph = step.get_concrete_function(start()).graph
    sent = [(op, wait) for op, wait, _ in journeys(graph)]
    # What goes into each call, and three of what is kept in it.
    assert len(sent) == len({op for op, _ in sent}) == 2 * 4
    assert set(last_report().offloaded) <= {op.inputs[0].name for op, _ in sent}
    assert all(wait.control_inputs for _, wait in sent)
