"""Bit for bit the gradients of `tf.gradients`, on networks with deterministic ops."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.networks import NETWORKS
from geutil.gradients import gradients, last_report
from tests.gradients.apart import is_child
from tests.gradients.networks import SMALL
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(
    not is_child("determinism"), reason="determinism holds for a whole process"
)
if is_child("determinism"):
    tf.keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()

# With fewer activations, "memory" would predict nothing to be saved.
LARGER = {
    "chain": {"rows": 64, "width": 64},
    "encoder": {"length": 64, "width": 64, "depth": 4},
}
QUICK = [
    ("chain", "memory", True),
    ("chain", "speed", True),
    ("U-Net", "speed", True),
    ("encoder", "memory", False),
]
OTHERS = ["MobileNetV2", "U-Net", "ResNet50", "DenseNet121", "EfficientNetB0"]
OTHERS = [*((name, "memory", True) for name in (*OTHERS, "encoder"))]
OTHERS += [("encoder", "speed", True)]
CASES = [*QUICK, *(pytest.param(*case, marks=thorough) for case in OTHERS)]


def values(step, take):
    """Return the gradients of a step from its first state, slices as they are."""

    @tf.function
    def traced(*batch):
        return take(step.loss(*batch), step.variables)

    before = [v.numpy() for v in step.state]
    result = traced(*step.tensors())
    after = [v.numpy() for v in step.state]
    for variable, value in zip(step.state, before, strict=True):
        variable.assign(value)
    return tf.nest.flatten(result, expand_composites=True), after


@cache
def plain(name, grappler):
    """Return a step and what plain gradients of it yield, with Grappler or without."""
    step = NETWORKS[name](**SMALL[name] | LARGER.get(name, {}))
    return step, *values(step, tf.gradients)


@pytest.mark.parametrize(("name", "mode", "grappler"), CASES, indirect=["grappler"])
def test_networks(name, mode, grappler):
    step, expected, moved = plain(name, grappler)
    actual, moved_too = values(
        step, lambda y, xs: gradients(y, xs, checkpoints=mode, min_checkpoint_size=64)
    )
    # One activation between two products: "speed" would keep as much as plain ones.
    saves = (name, mode) != ("chain", "speed")
    assert bool(last_report().recomputed) == saves
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)
    # Moving averages and seeds moved once.
    for a, e in zip(moved_too, moved, strict=True):
        np.testing.assert_array_equal(a, e)
