"""Small loops, and the gradients of layers that hold them."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from tests.gradients.checking import assert_close, trace_network

layers = keras.layers
ROWS = [256, 16]
"""The shape of a batch."""
SEQUENCES = [16, 12, 24]
"""That of a batch for recurrent layers."""


def gated(state, w):
    return tf.tanh(tf.sigmoid(tf.matmul(state, w)) * state)


def repeated(body, state):
    """Return what a loop makes of a state in 8 turns."""
    return tf.while_loop(
        lambda i, _: i < 8,
        lambda i, state: (i + 1, body(state)),
        (0, state),
        maximum_iterations=8,
    )[1]


class Gated(layers.Layer):
    """A loop of few ops."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=[shape[-1], shape[-1]])

    def call(self, x, training=None):
        return repeated(partial(gated, w=tf.convert_to_tensor(self.kernel)), x)


def traced(how, make=Gated, shape=ROWS, **options):
    """Return the gradients that `how` makes of a layer's loss, as a function."""
    keras.utils.set_random_seed(3)
    layer = make()
    layer.build(shape)
    return trace_network(layer, how, shape, **options)[1]


def batch(shape=ROWS):
    return tf.constant(np.random.default_rng(0).normal(size=shape).astype("f"))


def check_gradients(ours, plain, shape=ROWS):
    x = batch(shape)
    assert_close(ours(x), plain(x), tolerance=1e-5)


by_one = partial(gated, w=tf.eye(16))
STATES = tf.reshape(tf.linspace(-1.0, 1.0, 4096), [256, 16])
