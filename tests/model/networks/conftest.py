"""Fixtures for tests on real networks."""

import pytest
import tensorflow as tf

from tests.model.networks.fresh import FreshProcesses


@pytest.fixture(scope="session")
def fresh():
    return FreshProcesses()


@pytest.fixture
def as_they_are():
    """TensorFlow runs the ops of a graph as they are, so that equal means equal.

    Grappler fuses some ops, depending on the order in which it meets them. Rounding
    then differs between a graph with calls and the same one without.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
