"""Keras networks with batch norms that do something: everything at random."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def with_random_norms(network, seed=0):
    """Give all batch norms of a network random statistics and parameters.

    Fresh ones are almost the identity, and hide mistakes.
    """
    generator = np.random.default_rng(seed)
    for layer in network._flatten_layers():
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.set_weights([_random(generator, v) for v in layer.weights])
    return network


def _random(generator, variable):
    if variable.name in ("gamma", "moving_variance"):
        return generator.uniform(0.5, 2.0, variable.shape)
    return generator.normal(size=variable.shape) * 0.5
