"""A U-Net: four levels down, four up, and a concatenation across on each level."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.step import Step, Wrap, seeded, training_step, unwrapped

LEVELS = 4


def unet(
    *, batch: int = 4, pixels: int = 256, width: int = 32, wrap: Wrap = unwrapped
) -> Step:
    """Return a step that tells foreground from background.

    Args:
        batch: the number of images.
        pixels: their height and width, a multiple of 16.
        width: the channels of the first level; each level below has twice as many.
        wrap: put around each pair of convolutions.
    """
    random = seeded()
    layers = tf.keras.layers
    widths = [width << level for level in range(LEVELS + 1)]
    down = [_convolutions(n, 3 if i == 0 else n // 2) for i, n in enumerate(widths)]
    rising = widths[-2::-1]
    widen = [
        tf.keras.Sequential(
            [layers.Input((None, None, 2 * n)), layers.Conv2DTranspose(n, 2, 2)]
        )
        for n in rising
    ]
    up = [_convolutions(n, 2 * n) for n in rising]
    pool = layers.MaxPooling2D()
    head = tf.keras.Sequential([layers.Input((None, None, width)), layers.Conv2D(1, 1)])

    def loss(images: tf.Tensor, masks: tf.Tensor) -> tf.Tensor:
        x = images
        across = []
        for block in down[:-1]:
            x = wrap(_training(block))(x)
            across.append(x)
            x = pool(x)
        x = wrap(_training(down[-1]))(x)
        for enlarge, block in zip(widen, up, strict=True):
            x = tf.concat([across.pop(), enlarge(x)], -1)
            x = wrap(_training(block))(x)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(masks, head(x)))

    images = random.normal(size=(batch, pixels, pixels, 3)).astype(np.float32)
    masks = random.integers(2, size=(batch, pixels, pixels, 1)).astype(np.float32)
    return training_step([*down, *widen, *up, head], loss, images, masks)


def _convolutions(filters: int, channels: int) -> Any:
    layers = tf.keras.layers
    parts = [layers.Input((None, None, channels))]
    for _ in range(2):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    return tf.keras.Sequential(parts)


def _training(block: Any) -> Any:
    return lambda x: block(x, training=True)
