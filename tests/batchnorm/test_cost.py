"""Ten times the layers take ten times the work."""

import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import Builder
from tests.call_counts import count_calls
from tests.thorough import crossed


def behind(b, y):
    y = tf.nn.conv2d(y, b.weights(1, 1, 2, 2), 1, "SAME")
    return tf.nn.relu(b.norm(tf.nn.bias_add(y, b.weights(2)), 2))


def before(b, y):
    y = tf.nn.conv2d(b.norm(y, 2), b.weights(1, 1, 2, 2), 1, "SAME")
    return tf.nn.relu(tf.nn.bias_add(y, b.weights(2)))


def refused(b, y):
    return tf.nn.relu(b.norm(tf.nn.relu(y), 2))


def calls(block, count, parameters):
    """Count the calls of Python functions that a fold makes."""
    with tf.Graph().as_default() as graph:
        b = Builder(parameters)
        y = b.data(2, 3, 3, 2, known=())
        for _ in range(count):
            y = block(b, y)
        tf.identity(y, "out")
    count_of_calls, report = count_calls(lambda: fold_batch_norms(graph))
    assert len(report.folded) == (0 if block is refused else count)
    assert len(report.refused) == (count if block is refused else 0)
    return count_of_calls


@pytest.mark.parametrize(
    ("block", "parameters"),
    crossed([behind, before, refused], ["constants", "resource variables"], together=1),
)
def test_folding_is_linear_in_the_layers(block, parameters):
    calls(block, 1, parameters)
    assert calls(block, 100, parameters) < 12 * calls(block, 10, parameters)
