"""Ten times the layers take ten times the work."""

from itertools import cycle, islice

import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import Builder
from tests.call_counts import count_calls


def behind(b, y):
    y = tf.nn.conv2d(y, b.weights(1, 1, 2, 2), 1, "SAME")
    return tf.nn.relu(b.norm(tf.nn.bias_add(y, b.weights(2)), 2))


def before(b, y):
    y = tf.nn.conv2d(b.norm(y, 2), b.weights(1, 1, 2, 2), 1, "SAME")
    return tf.nn.relu(tf.nn.bias_add(y, b.weights(2)))


def refused(b, y):
    return tf.nn.relu(b.norm(tf.nn.relu(y), 2))


def joined(b, y):
    first, second = (
        tf.nn.conv2d(y, b.weights(1, 1, 2, 2), 1, "SAME") for _ in range(2)
    )
    return tf.nn.relu(b.norm(first + second, 2))


BLOCKS = [
    (block, parameters)
    for parameters in ("constants", "resource variables")
    for block in (behind, before, refused, joined)
]


def calls(rounds):
    """Count the calls of Python functions that a fold of all blocks in turn makes."""
    with tf.Graph().as_default() as graph:
        b = Builder()
        y = b.data(2, 3, 3, 2, known=())
        for block, b.parameters in islice(cycle(BLOCKS), rounds * len(BLOCKS)):
            y = block(b, y)
        tf.identity(y, "out")
    count, report = count_calls(lambda: fold_batch_norms(graph))
    # A norm of two layers has an entry for each.
    assert len(report.folded) == 8 * rounds
    assert len(report.refused) == 2 * rounds
    return count


def test_folding_is_linear_in_the_layers():
    calls(1)
    # Something is done once, so a little that grows faster shows.
    assert calls(10) < 10 * calls(1)


def test_norms_of_sums_of_norms_make_as_many_ops_as_there_are_layers():
    made = []
    for count in (10, 20):
        with tf.Graph().as_default() as graph:
            b = Builder()
            x = b.data(2, 3, 3, 2)
            y = tf.nn.conv2d(x, b.weights(1, 1, 2, 2), 1, "SAME")
            for _ in range(count):
                y = b.norm(y + tf.nn.conv2d(x, b.weights(1, 1, 2, 2), 1, "SAME"), 2)
            tf.identity(y, "out")
        before = len(graph.get_operations())
        report = fold_batch_norms(graph, strict=True)
        assert len({entry.norm for entry in report.folded}) == count
        made.append(len(graph.get_operations()) - before)
    assert made[1] < 2.1 * made[0]
