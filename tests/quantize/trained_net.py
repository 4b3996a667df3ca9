"""A network as old code builds it: one function for training and for evaluation."""

import tensorflow as tf

v1 = tf.compat.v1
EPSILON = 0.1


def norm(y, fused, is_training, updates):
    """Return a batch norm of a tensor; its updates are added to a list."""
    size = y.shape.as_list()[-1]
    with v1.variable_scope("norm"):
        beta = v1.get_variable("beta", [size], initializer=_random(0.5))
        gamma = v1.get_variable("gamma", [size], initializer=_around_one())
        options = {"trainable": False}
        mean = v1.get_variable("mean", [size], initializer=_random(0.3), **options)
        variance = v1.get_variable(
            "variance", [size], initializer=_around_one(), **options
        )
        if fused:
            given = {} if is_training else {"mean": mean, "variance": variance}
            z, batch_mean, batch_variance = v1.nn.fused_batch_norm(
                y, gamma, beta, epsilon=EPSILON, is_training=is_training, **given
            )
        else:
            batch_mean, batch_variance = mean, variance
            if is_training:
                batch_mean, batch_variance = tf.nn.moments(y, [0, 1, 2])
            z = tf.nn.batch_normalization(
                y, batch_mean, batch_variance, beta, gamma, EPSILON
            )
        if is_training:
            for moving, batch in ((mean, batch_mean), (variance, batch_variance)):
                updates.append(v1.assign_sub(moving, (moving - batch) * 0.1))
    return z


def layer(x, kind, name, channels, norms, is_training, updates, activation=None):
    """Return a convolution, its norm or bias, and its activation."""
    with v1.variable_scope(name):
        inputs = x.shape.as_list()[-1]
        if kind == "depthwise":
            w = v1.get_variable("weights", [3, 3, inputs, 1], initializer=_random(0.5))
            y = tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME", name="depthwise")
        else:
            shape = [3, 3, inputs, channels]
            w = v1.get_variable("weights", shape, initializer=_random(0.4))
            y = tf.nn.conv2d(x, w, 1, "SAME", name="Conv2D")
        if norms == "none":
            bias = v1.get_variable("bias", [y.shape[-1]], initializer=_random(0.5))
            y = tf.nn.bias_add(y, bias)
        else:
            y = norm(y, norms == "fused", is_training, updates)
        return y if activation is None else activation(y)


def build(norms, is_training):
    """Build the network in the default graph; return input, logits and updates."""
    updates = []
    args = (norms, is_training, updates)
    x = v1.placeholder(tf.float32, [None, 6, 6, 3], "x")
    y = first = layer(x, "conv", "first", 4, *args, tf.nn.relu6)
    y = layer(y, "depthwise", "second", 4, *args, tf.nn.relu)
    y = layer(y, "conv", "third", 4, *args)
    with v1.variable_scope("bypass"):
        y = tf.nn.relu(tf.add(y, first, name="sum"))
    y = layer(y, "conv", "fourth", 5, *args)
    with v1.variable_scope("last"):
        y = tf.reduce_mean(y, [1, 2])
        w = v1.get_variable("weights", [5, 3], initializer=_random(0.5))
        logits = tf.matmul(y, w, name="logits")
    return x, logits, updates


def _random(size):
    # Each its own, but the same ones in each graph.
    return v1.random_normal_initializer(0.0, size, seed=len(v1.global_variables()))


def _around_one():
    return v1.random_uniform_initializer(0.5, 2.0, seed=len(v1.global_variables()))
