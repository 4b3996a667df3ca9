"""Convolutions with batch norms whose variables are given."""

import numpy as np
import tensorflow as tf

DEPTH, CHANNELS, VARIABLES = 2, 4, 5


def values(rng):
    """Return the weights of the layers, behind each its moving averages."""
    found = []
    for _ in range(DEPTH):
        found.append(rng.normal(size=(3, 3, CHANNELS, CHANNELS)) / 4)
        found += [rng.uniform(0.5, 1.5, CHANNELS), rng.normal(size=CHANNELS)]
        found += [rng.normal(size=CHANNELS), rng.uniform(0.5, 1.5, CHANNELS)]
    return [np.float32(v) for v in found]


def weights_of(variables):
    """Return the variables but for moving averages."""
    return [v for i, v in enumerate(variables) if i % VARIABLES < 3]


def forward(x, weights, variables, *, is_training):
    """Return the result of the network; in training it sets the moving averages."""
    for i in range(DEPTH):
        kernel, scale, offset = weights[3 * i : 3 * i + 3]
        averages = variables[VARIABLES * i + 3 : VARIABLES * i + 5]
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        moments = averages
        if is_training:
            moments = tf.nn.moments(x, [0, 1, 2])
            for average, moment in zip(averages, moments, strict=True):
                average.assign(0.9 * average + 0.1 * moment)
        x = tf.nn.batch_normalization(x, *moments, offset, scale, 0.1)
        x = tf.nn.swish(x) if i else tf.nn.relu(x)
    return tf.reduce_mean(x, [1, 2])
