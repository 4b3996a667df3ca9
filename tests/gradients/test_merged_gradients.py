"""oneDNN merges the gradients of a filter and a bias: no segment comes in between.

`tests/test_tensorflow_facts.py` shows what happens otherwise.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.checking import assert_close

v1 = tf.compat.v1


def network(x):
    """Return the weights, the tensors of all three layers, and the end."""
    weights, tensors, h = [], {}, x
    for layer in "012":
        w = tf.constant(np.cos(np.arange(64.0)).reshape(1, 1, 8, 8), tf.float32)
        b = tf.constant(np.linspace(-0.1, 0.1, 8), tf.float32)
        weights += [w, b]
        product = tf.nn.conv2d(h, w, 1, "SAME")
        biased = tf.nn.bias_add(product, b)
        h = tf.nn.relu(biased)
        tensors |= {f"conv{layer}": product, f"bias{layer}": biased, f"relu{layer}": h}
    return weights, tensors, tf.reduce_sum(h * h)


# Each with its convolution in another segment than what its filter's gradient reads.
@pytest.mark.parametrize("kept", ["conv1", "bias1", "relu1", "conv2", "bias2"])
def test_gradients_of_a_bias(kept):
    shape = [2, 4, 4, 8]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape)
        weights, tensors, y = network(x)
        plain = tf.gradients(y, weights)
        ours = gradients(y, weights, checkpoints=[tensors[kept]], min_checkpoint_size=0)
        assert last_report().recomputed
    feed = {x: np.sin(np.arange(256.0)).reshape(shape)}
    with v1.Session(graph=graph) as session:
        assert_close(session.run(ours, feed), session.run(plain, feed))


def branches(x, count):
    """Return the weights, and the end of a network that sums branches."""
    weights, h = [], x
    for block in range(count):
        parts = [h]
        for branch in range(2):
            part = h
            for layer in range(branch + 1):
                phase = 100.0 * block + 10.0 * branch + layer
                w = tf.constant(
                    np.cos(np.arange(576.0) + phase).reshape(3, 3, 8, 8) / 20,
                    tf.float32,
                )
                b = tf.constant(np.linspace(-0.1, 0.1, 8), tf.float32)
                weights += [w, b]
                part = tf.nn.relu(part)
                part = tf.nn.bias_add(tf.nn.conv2d(part, w, 1, "SAME"), b)
            parts.append(part)
        h = parts[1] + parts[2] + parts[0]
    return weights, tf.reduce_sum(h * h)


@pytest.mark.parametrize("checkpoints", ["memory", "speed", None])
@pytest.mark.parametrize("reverse", [False, True])
def test_layers_with_the_same_gradient(checkpoints, reverse):
    """Branches that are summed; oneDNN may merge a bias with another's filter."""
    shape = [4, 16, 16, 8]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape)
        weights, y = branches(x, 4)
        weights = weights[::-1] if reverse else weights
        plain = tf.gradients(y, weights)
        ours = gradients(y, weights, checkpoints=checkpoints)
    feed = {x: np.sin(np.arange(8192.0)).reshape(shape)}
    with v1.Session(graph=graph) as session:
        assert_close(session.run(ours, feed), session.run(plain, feed))
