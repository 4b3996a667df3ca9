"""Small networks, for all tests of gradients."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from tests.gradients.networks import SMALL, small_step, trace_forward
from tests.thorough import chosen


@pytest.fixture(
    scope="session", params=chosen(SMALL, "chain", "MobileNetV2", "U-Net", "encoder")
)
def step(request):
    """The training step of each network in turn."""
    return small_step(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["same bits", "usual"])
def determinism(request):
    """Whether the process asks for the same bits every time."""
    if request.param:
        tf.config.experimental.enable_op_determinism()
    yield request.param
    config.disable_op_determinism()


@pytest.fixture
def forward(step):
    """Each network's forward part, in a new graph that a test may add gradients to."""
    return trace_forward(step)


@pytest.fixture
def graph():
    """A graph, the default one of the test."""
    with tf.Graph().as_default() as made:
        yield made
