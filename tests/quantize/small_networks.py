"""Small networks of every kind, whose values between ops can be asked for."""

import numpy as np
import tensorflow as tf

from geutil.quantize import calibrate, quantize


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prepared(m, data=None, method="min_max", **options):
    """Quantize a model, by default for inference, calibrate it by data, return it."""
    quantize(m, **{"is_training": False, **options})
    if data is not None:
        calibrate(m, data, method, rounding="nearest")
    return m


def convolved(x, weights, bias, name):
    made = tf.nn.conv2d(x, weights, 1, "SAME", name=name)
    return tf.nn.bias_add(made, bias)


def two_branches(x, weights, traced=None):
    """Two convolutions, one depthwise, joined by a concat; then a dense layer.

    `traced` takes what each range is learnt from.
    """
    traced = {} if traced is None else traced
    with tf.name_scope("left"):
        left = tf.nn.relu(convolved(x, weights["left"], weights["bias"], "conv"))
    with tf.name_scope("right"):
        right = tf.nn.depthwise_conv2d(
            x, weights["right"], [1, 1, 1, 1], "SAME", name="depthwise"
        )
    with tf.name_scope("join"):
        joined = tf.concat([left, right], -1)
        pooled = tf.reduce_mean(joined, [1, 2])
    with tf.name_scope("dense"):
        y = tf.matmul(pooled, weights["dense"], name="product")
    traced |= {"x": x, "left": left, "right": right, "pooled": pooled, "y": y}
    return {"y": y}


def branch_weights():
    return {
        "left": normal(3, 3, 3, 4, seed=1),
        "bias": normal(4, seed=2),
        "right": normal(3, 3, 3, 2, seed=3),
        "dense": normal(10, 5, seed=4),
    }


def branch_inputs(count=3, batch=4):
    return [normal(batch, 8, 8, 3, seed=10 + i) * (1 + i) for i in range(count)]


def separable(images, width=8, blocks=2):
    """Convolutions, depthwise ones, a residual sum: like a MobileNetV2, but small."""
    layers = tf.keras.layers
    x = image = layers.Input(images.shape[1:], name="image")
    x = layers.Conv2D(width, 3, 2, "same", use_bias=False, name="stem")(x)
    x = layers.ReLU(6.0)(layers.BatchNormalization(name="stem_norm")(x))
    for n in range(1, blocks + 1):
        y = layers.Conv2D(24, 1, use_bias=False, name=f"expand_{n}")(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, 1, "same", use_bias=False, name=f"deep_{n}")(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.Conv2D(width, 1, use_bias=False, name=f"project_{n}")(y)
        x = layers.Add(name=f"sum_{n}")([x, layers.BatchNormalization()(y)])
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(image, layers.Dense(10, name="logits")(x), name="net")
