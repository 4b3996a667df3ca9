"""Small networks as training steps in a v1 graph: fetches and a feed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass
class Step:
    graph: tf.Graph
    fetches: list[Any]
    feeds: dict[tf.Tensor, np.ndarray]


class Builder:
    """Makes layers in a graph, and keeps their variables."""

    def __init__(self, dtype=tf.float32):
        self.variables, self._dtype, self._next = [], dtype, None

    def again(self):
        """Let what is built from now on have the same variables."""
        self._next = iter(self.variables)

    def variable(self, *shape):
        if self._next is not None:
            return next(self._next)
        initial = np.random.RandomState(len(self.variables)).normal(size=shape) * 0.05
        variable = tf.compat.v1.get_variable(
            f"v{len(self.variables)}",
            initializer=tf.constant(initial, self._dtype),
            use_resource=True,
        )
        self.variables.append(variable)
        return variable

    def dense(self, x, width):
        x = tf.matmul(x, self.variable(x.shape[-1], width))
        return tf.nn.bias_add(x, self.variable(width))

    def conv(self, x, width, size=3, stride=1):
        kernel = self.variable(size, size, x.shape[-1], width)
        x = tf.nn.conv2d(x, kernel, stride, "SAME")
        return tf.nn.bias_add(x, self.variable(width))

    def norm(self, x):
        """Return batch normalization as Keras 3 computes it."""
        axes = list(range(len(x.shape) - 1))
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        scale = self.variable(x.shape[-1])
        offset = self.variable(x.shape[-1])
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


def chain(net, x):
    for _ in range(12):
        x = tf.tanh(net.dense(x, x.shape[-1]))
    return x


def residual(net, x):
    x = tf.nn.relu(net.norm(net.conv(x, 32)))
    for width in (32, 64, 64):
        y = tf.nn.relu(net.norm(net.conv(x, width)))
        y = net.norm(net.conv(y, width))
        if x.shape[-1] != width:
            x = net.conv(x, width, 1)
        x = tf.nn.relu(x + y)
    return x


def unet(net, x):
    skips = []
    for width in (16, 32):
        x = tf.nn.relu(net.norm(net.conv(x, width)))
        skips.append(x)
        x = tf.nn.max_pool2d(x, 2, 2, "SAME")
    x = tf.nn.relu(net.norm(net.conv(x, 64)))
    for skip in reversed(skips):
        x = tf.repeat(tf.repeat(x, 2, axis=1), 2, axis=2)
        x = tf.concat([skip, x], axis=-1)
        x = tf.nn.relu(net.norm(net.conv(x, skip.shape[-1])))
    return x


def attention(net, x):
    for _ in range(2):
        width, heads = x.shape[-1], 4
        q, k, v = (
            tf.einsum("btd,dnh->btnh", x, net.variable(width, heads, width // heads))
            for _ in range(3)
        )
        scores = tf.nn.softmax(tf.einsum("btnh,bsnh->bnts", q, k))
        mixed = tf.einsum("bnts,bsnh->btnh", scores, v)
        x += tf.einsum(
            "btnh,nhd->btd", mixed, net.variable(heads, width // heads, width)
        )
        flat = tf.reshape(x, [-1, width])
        hidden = tf.nn.gelu(net.dense(flat, 4 * width))
        x += tf.reshape(net.dense(hidden, width), x.shape)
    return x


NETWORKS = {
    chain: (2048, 256),
    residual: (4, 32, 32, 3),
    unet: (4, 64, 64, 3),
    attention: (4, 128, 128),
}


def training_step(network, *, batch_known=True) -> Step:
    """Return the gradients of a network's mean square as a step."""
    shape = NETWORKS[network]
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(
            tf.float32, shape if batch_known else [None, *shape[1:]], name="x"
        )
        net = Builder()
        loss = tf.reduce_mean(tf.square(network(net, x)))
        gradients = tf.gradients(loss, net.variables)
    values = np.random.RandomState(0).rand(*shape).astype("f")
    return Step(graph, [loss, *gradients], {x: values})
