"""Nets of a layer, a norm, a bypass and an activation, and what numpy makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
SIZE = 4
"""Channels of data and results."""
EPSILON = 0.1
ACTIVATIONS = {
    "relu": (tf.nn.relu, lambda x: np.maximum(x, 0)),
    "relu6": (tf.nn.relu6, lambda x: np.clip(x, 0, 6)),
    "none": (None, lambda x: x),
}
LAYERS = ("conv", "dense", "depthwise", "separable", "atrous")


def _conv(x, w, rate=1):
    """Return a convolution with zeros around, stride 1."""
    size = w.shape[0] // 2 * rate
    x = np.pad(np.float64(x), [(0, 0), (size, size), (size, size), (0, 0)])
    rows = x.shape[1] - 2 * size
    taps = [
        x[:, i * rate :, j * rate :][:, :rows, :rows] @ w[i, j]
        for i in range(w.shape[0])
        for j in range(w.shape[1])
    ]
    return sum(taps)


def _depthwise(x, w):
    full = np.zeros((*w.shape[:2], SIZE, SIZE))
    full[..., range(SIZE), range(SIZE)] = w[..., 0]
    return _conv(x, full)


REFERENCE = {
    "conv": _conv,
    "dense": lambda x, w: np.float64(x) @ w,
    "depthwise": _depthwise,
    "separable": _conv,
    "atrous": lambda x, w: _conv(x, w, 2),
}


@dataclass
class Net:
    """A net in the default graph, below the current name scope.

    Attributes:
        layer: which layer.
        norm: "fused", "unfused" or "none", which is a bias.
        variables: "resource", "ref" or "constant".
        activation: which activation.
        bypass: whether the input is added before it.
        random: where values come from.
    """

    layer: str
    norm: str
    variables: str
    activation: str
    bypass: bool
    random: np.random.Generator
    updates: list = field(default_factory=list)

    def build(self):
        shape = [8, SIZE] if self.layer == "dense" else [2, 6, 6, SIZE]
        self.data = np.float32(self.random.normal(size=shape) * 2)
        self.x = v1.placeholder(tf.float32, [None, *shape[1:]], "x")
        self.linear = self._linear()
        y = self._normalized(self.linear)
        with tf.name_scope("end"):
            y = tf.add(y, self.x, name="sum") if self.bypass else y
            activation = ACTIVATIONS[self.activation][0]
            self.out = y if activation is None else activation(y, name="activation")
            if self.norm == "fused" and self.out is y and not self.bypass:
                # Of a norm that nothing reads only the statistics would count.
                self.out = tf.identity(y)
        return self

    def _parameter(self, values):
        values = np.float32(values)
        if self.variables == "constant":
            return tf.constant(values)
        resource = self.variables == "resource"
        return v1.Variable(values, use_resource=resource)

    def _linear(self):
        """Return what the layer makes; note the op that the norm is folded into."""
        normal, x = self.random.normal, self.x
        with tf.name_scope("layer"):
            if self.layer == "dense":
                self.kernel = normal(size=[SIZE, SIZE])
                y = tf.matmul(x, self._parameter(self.kernel), name="op")
            elif self.layer in ("depthwise", "separable"):
                kernel = normal(size=[3, 3, SIZE, 1])
                y = tf.raw_ops.DepthwiseConv2dNative(
                    input=x,
                    filter=self._parameter(kernel),
                    strides=[1, 1, 1, 1],
                    padding="SAME",
                    name="op" if self.layer == "depthwise" else "first",
                )
                self.kernel = kernel
                if self.layer == "separable":
                    self.kernel = normal(size=[1, 1, SIZE, SIZE])
                    w = self._parameter(self.kernel)
                    y = tf.nn.conv2d(y, w, 1, "SAME", name="op")
            elif self.layer == "conv":
                self.kernel = normal(size=[3, 3, SIZE, SIZE])
                w = self._parameter(self.kernel)
                y = tf.nn.conv2d(x, w, 1, "SAME", name="op")
            else:
                self.kernel = normal(size=[3, 3, SIZE, SIZE])
                w = self._parameter(self.kernel)
                spread = tf.space_to_batch(x, [2, 2], [[2, 2], [2, 2]])
                y = tf.nn.conv2d(spread, w, 1, "VALID", name="op")
                y = tf.raw_ops.BatchToSpaceND(
                    input=y, block_shape=[2, 2], crops=[[0, 0], [0, 0]]
                )
        return y

    def _normalized(self, y):
        self.beta, self.gamma = self.random.normal(size=SIZE), self._positive()
        with tf.name_scope("norm"):
            if self.norm == "none":
                return tf.nn.bias_add(y, self._parameter(self.beta))
            self.moving_mean, self.moving = (
                self.random.normal(size=SIZE),
                self._positive(),
            )
            beta, gamma = self._parameter(self.beta), self._parameter(self.gamma)
            if self.norm == "fused":
                flat = tf.reshape(y, [-1, 1, 1, SIZE]) if self.layer == "dense" else y
                z, mean, variance = v1.nn.fused_batch_norm(
                    flat, gamma, beta, epsilon=EPSILON
                )
                z = tf.reshape(z, [-1, SIZE]) if self.layer == "dense" else z
            else:
                mean, variance = tf.nn.moments(y, list(range(len(y.shape) - 1)))
                z = tf.nn.batch_normalization(y, mean, variance, beta, gamma, EPSILON)
            for values, batch in ((self.moving_mean, mean), (self.moving, variance)):
                # Even a net of constants keeps averages, which do not move here.
                kept = v1.Variable(
                    np.float32(values),
                    trainable=False,
                    use_resource=self.variables != "ref",
                )
                self.updates.append(v1.assign_sub(kept, (kept - batch) * 0.0))
        return z

    def _positive(self):
        return self.random.uniform(0.5, 2.0, SIZE)

    # -- in numpy ----------------------------------------------------------------------

    def weights(self):
        """Return the weights as they are quantized: folded with moving statistics."""
        if self.norm == "none":
            return np.float32(self.kernel)
        factor = self.gamma / np.sqrt(self.moving + EPSILON)
        axis = [-1, 1] if self.layer == "depthwise" else [-1]
        return self.kernel * factor.reshape(axis)

    def result(self, x, w, old_x, statistics):
        """Return what the layer and its norm make.

        Args:
            x: what the folded layer reads.
            w: its weights.
            old_x: what the layer reads that makes the statistics, if they are exact.
            statistics: "exact" or "one_pass".
        """
        apply = REFERENCE[self.layer]
        y = apply(x, w)
        if self.norm == "none":
            return y + self.beta
        if statistics == "exact":
            batch = apply(old_x, self.kernel)
        else:
            batch = y * (np.sqrt(self.moving + EPSILON) / self.gamma)
        axes = tuple(range(batch.ndim - 1))
        deviation = np.sqrt(batch.var(axes) + EPSILON)
        shift = self.beta - batch.mean(axes) * self.gamma / deviation
        return y * (np.sqrt(self.moving + EPSILON) / deviation) + shift

    def activated(self, y):
        return ACTIVATIONS[self.activation][1](y)
