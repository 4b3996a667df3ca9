"""Networks of Keras that tell ten kinds of images apart, without being trained.

A network at random tells nothing apart, and what rounding changes in it grows from
layer to layer; a trained one is robust. Here kernels blur, norms have statistics of the
data, and the last layer compares features with those of each class, which is what
training arrives at, roughly.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.batchnorm.calibrated import with_calibrated_norms

CLASSES = 10
_SHARE_OF_BLUR = 0.9
_NOISE = 0.2
_COLOUR = 0.5
_RANGE_OF_LOGITS = 32.0


def images(pixels, count, seed=0):
    """Return images between -1 and 1: one of ten patterns of waves each, and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:pixels, 0:pixels] / pixels
    of_kinds = np.random.default_rng(1)
    rates = of_kinds.uniform(-2, 2, (2, CLASSES, 1, 1, 3))
    waves = np.sin(2 * np.pi * (rates[0] * y[..., None] + rates[1] * x[..., None]))
    colours = of_kinds.uniform(-1, 1, (CLASSES, 1, 1, 3))
    kinds = np.arange(count) % CLASSES
    noise = random.uniform(-1, 1, (count, pixels, pixels, 3))
    plain = _COLOUR * colours + (1 - _COLOUR - _NOISE) * waves
    return (plain[kinds] + _NOISE * noise).astype(np.float32), kinds


def classifier(make, pixels, scale=1.0, offset=0.0, seed=0):
    """Return a network of Keras with a last layer that tells images apart.

    Args:
        make: the function in `tf.keras.applications`.
        pixels: height and width.
        scale: what images are multiplied with, for networks with another input range.
        offset: what is added then.
        seed: of the random numbers.
    """
    tf.keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    shape = (pixels, pixels, 3)
    body = make(weights=None, include_top=False, pooling="avg", input_shape=shape)
    x, kinds = images(pixels, 4 * CLASSES)
    x = x * scale + offset
    for layer in body._flatten_layers():
        _blur(layer, random)
    with_calibrated_norms(body, x[: 2 * CLASSES])
    return _with_prototypes(body, x, kinds)


def _with_prototypes(body, x, kinds):
    """Return a network with a last layer that compares features with their means."""
    features = body(x, training=False).numpy()
    means = np.stack([features[kinds == kind].mean(0) for kind in range(CLASSES)])
    middle = means.mean(0)
    weights = (means - middle).T
    weights *= _RANGE_OF_LOGITS / np.ptp((features - middle) @ weights)
    last = tf.keras.layers.Dense(CLASSES)
    logits = last(body.output)
    shares = tf.keras.layers.Softmax()(logits)
    network = tf.keras.Model(body.input, {"logits": logits, "shares": shares})
    last.set_weights([weights, -middle @ weights])
    return network


def _blur(layer, random):
    """Let a convolution with a window blur, and give it a bias that is not zero."""
    if not isinstance(layer, tf.keras.layers.Conv2D | tf.keras.layers.DepthwiseConv2D):
        return
    kernel, *rest = layer.get_weights()
    height, width, *channels = kernel.shape
    if height * width > 1:
        mixed = random.normal(size=channels)
        if isinstance(layer, tf.keras.layers.DepthwiseConv2D):
            mixed = np.ones(channels)
        rough = random.normal(size=kernel.shape)
        kernel = _SHARE_OF_BLUR * mixed + (1 - _SHARE_OF_BLUR) * rough
        kernel /= np.sqrt(height * width * channels[0])
    biases = [random.normal(size=bias.shape) * 0.1 for bias in rest]
    layer.set_weights([kernel, *biases])


def encoder(length=16, width=32, heads=4, depth=2, seed=0):
    """Return a transformer encoder that tells ten kinds of sequences apart."""
    tf.keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    layers = tf.keras.layers
    x = inputs = layers.Input((length, width))
    for _ in range(depth):
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        y = layers.Dense(2 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(y))
    body = tf.keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    for variable in body.weights:
        if variable.name in ("bias", "beta"):
            variable.assign(random.normal(size=variable.shape) * 0.1)
        if variable.name == "gamma":
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    x, kinds = sequences(4 * CLASSES, length, width)
    return _with_prototypes(body, x, kinds)


def sequences(count, length=16, width=32, seed=0):
    """Return sequences of vectors: of one of ten kinds each, and noise."""
    random = np.random.default_rng(seed)
    of_kinds = np.random.default_rng(1).normal(size=(CLASSES, 1, width))
    kinds = np.arange(count) % CLASSES
    noise = random.normal(size=(count, length, width))
    return (of_kinds[kinds] + 0.5 * noise).astype(np.float32), kinds
