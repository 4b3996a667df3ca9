"""From a Keras network to an int8 file that computes the same, in six lines.

Run it with `python -m examples.int8`. It uses nothing but the public API of geutil. The
weights and the data are random but fixed: what is checked is that the file computes
what the simulation does, and that both are near the network in float.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8

PIXELS = 32
MOST_NOISE = 0.02
"""Mean square of the error of int8, relative to that of what the network computes."""


def keras_network(images: np.ndarray) -> tf.keras.Model:
    """Build a small network with batch norms that fit the images."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    x = image = layers.Input((PIXELS, PIXELS, 3), name="image")
    for filters in (16, 24, 32):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(x))
        x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        x = layers.ReLU(6.0)(layers.BatchNormalization(momentum=0.0)(x))
    x = layers.Dense(10, name="logits")(layers.GlobalAveragePooling2D()(x))
    network = tf.keras.Model(image, x)
    network(images, training=True)
    return network


def main() -> int:
    """Walk the road; the exit code is 0 when every check holds."""
    images = np.random.default_rng(0).normal(size=(64, PIXELS, PIXELS, 3))
    images = images.astype(np.float32)
    network = keras_network(images)
    data = [{"image": part} for part in np.split(images, 4)]

    m = model.open(network)
    print(fold_batch_norms(m), "\n")
    print(quantize(m, is_training=False), "\n")
    print(calibrate(m, data), "\n")
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)

    print(f"{len(blob):,} bytes; {comparison}")
    exact = network(images, training=False).numpy()
    (simulated,) = m.run(image=images).values()
    noise = float(((simulated - exact) ** 2).mean() / exact.var())
    checks = {
        "the file computes what the simulation does, within a step or two": (
            comparison.most <= 2 and not comparison.float_ops
        ),
        f"int8 is near float: noise {noise:.5f}": noise <= MOST_NOISE,
    }
    for what, holds in checks.items():
        print(f"  [{'ok' if holds else 'FAILED'}] {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
