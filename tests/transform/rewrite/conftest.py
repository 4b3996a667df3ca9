"""A graph that tests of rewrites build."""

import pytest
import tensorflow as tf


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph
