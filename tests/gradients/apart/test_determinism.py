"""Bit for bit the gradients of `tf.gradients`, on networks with deterministic ops.

Without Grappler, which would fuse the ops of the two steps in different ways.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.apart import is_child
from tests.gradients.networks import small_step

pytestmark = pytest.mark.skipif(
    not is_child("determinism"), reason="determinism holds for a whole process"
)
if is_child("determinism"):
    tf.keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


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


# Gradients are added two by two: the order of a longer sum hangs on free buffers.
TWO_BY_TWO = {"aggregation_method": tf.AggregationMethod.EXPERIMENTAL_TREE}


@pytest.mark.parametrize("mode", ["memory", "speed"])
@pytest.mark.parametrize("name", ["chain", "MobileNetV2", "U-Net", "encoder"])
def test_networks(name, mode):
    step = small_step(name)
    expected, moved = values(step, lambda y, xs: tf.gradients(y, xs, **TWO_BY_TWO))
    actual, moved_too = values(
        step,
        lambda y, xs: gradients(
            y, xs, checkpoints=mode, min_checkpoint_size=64, **TWO_BY_TWO
        ),
    )
    assert last_report().recomputed or name == "chain"
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)
    # Moving averages and seeds moved once.
    for a, e in zip(moved_too, moved, strict=True):
        np.testing.assert_array_equal(a, e)
