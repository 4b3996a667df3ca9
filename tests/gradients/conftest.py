"""Fixtures for all tests of gradients."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import config


@pytest.fixture(scope="module", params=[True, False], ids=["same bits", "usual"])
def determinism(request):
    """Whether the process asks for the same bits every time."""
    if request.param:
        tf.config.experimental.enable_op_determinism()
    yield request.param
    config.disable_op_determinism()


@pytest.fixture
def grappler(request):
    """Whether Grappler rewrites graphs; the steps of some networks differently.

    Of the plain step of an encoder it joins and reorders sums, and products with
    constants, that it leaves as they are where something waits in between.
    """
    options = tf.config.optimizer.get_experimental_options()
    off = {"disable_meta_optimizer": not request.param}
    tf.config.optimizer.set_experimental_options(options | off)
    yield request.param
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False} | options
    )


@pytest.fixture
def deterministic():
    """A process that asks for the same bits every time."""
    tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()
