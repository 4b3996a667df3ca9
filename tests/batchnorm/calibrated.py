"""Keras networks whose batch norms do something: at random, or calibrated.

The results of calibrated ones depend on what they are given.

With statistics drawn at random most of a deep network's signal dies on the way, and its
result is nearly the same for all inputs: nothing could go wrong in it. Here the moving
statistics are near those of a batch, as they are in trained networks.

The offsets and the floor of the variance were chosen among a dozen settings, as those
in which float32 rounds least: folded and unfolded graphs round differently, and with
more of a channel cancelled by its norm, freezing alone moves the results by more than
1e-5. That folding itself is right shows in float64, where it is held to 1e-12.
"""

import numpy as np
import tensorflow as tf


def norms_of(network):
    """Return the batch norms of a network, counted by Keras alone."""
    layers = network._flatten_layers()
    return [la for la in layers if isinstance(la, tf.keras.layers.BatchNormalization)]


def with_random_norms(network, seed=0):
    """Give all batch norms of a network random statistics and parameters.

    Fresh ones are almost the identity, and hide mistakes.
    """
    generator = np.random.default_rng(seed)
    for norm in norms_of(network):
        norm.set_weights([_random(generator, v) for v in norm.weights])
    return network


def _random(generator, variable):
    if variable.name in ("gamma", "moving_variance"):
        return generator.uniform(0.5, 2.0, variable.shape)
    return generator.normal(size=variable.shape) * 0.5


def with_calibrated_norms(network, batch, seed=0):
    """Give all batch norms parameters at random, and statistics near those of a batch.

    The batch runs through the network once, at inference. Each norm sets its statistics
    from what it is given then, so that those behind it see what it makes of it.

    Args:
        network: a Keras model.
        batch: an input of it.
        seed: of the random numbers.
    """
    generator = np.random.default_rng(seed)
    norms = norms_of(network)
    for norm in norms:
        norm.call = _calibrating(norm, norm.call, generator)
    network(batch, training=False)
    for norm in norms:
        del norm.call
    return network


def _calibrating(norm, call, generator):
    def calibrate(inputs, training=None, mask=None):
        rank = len(inputs.shape)
        axes = [i for i in range(rank) if i != norm.axis % rank]
        mean, variance = (t.numpy() for t in tf.nn.moments(inputs, axes))
        size = mean.shape
        # A channel that hardly varies would be rounding errors, made large.
        variance = np.maximum(variance, 0.1 * mean**2)
        noise = 0.2 * generator.normal(size=size) * np.sqrt(variance)
        norm.moving_mean.assign(mean + noise)
        norm.moving_variance.assign(generator.uniform(0.7, 1.4, size) * variance)
        if norm.gamma is not None:
            norm.gamma.assign(generator.uniform(0.5, 1.5, size))
        if norm.beta is not None:
            norm.beta.assign(generator.normal(2.0, 1.0, size))
        return call(inputs, training=False)

    return calibrate
