"""LSTM layers over a sequence: a loop in the graph for each."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from benchmarks.networks.step import Step, Wrap, seeded, training_step, unwrapped


def recurrent(
    *,
    batch: int = 32,
    length: int = 50,
    width: int = 128,
    depth: int = 3,
    wrap: Wrap = unwrapped,
) -> Step:
    """Return a step of a stack of LSTM layers that predicts a number for each place.

    Args:
        batch: the number of sequences.
        length: the places of each.
        width: the features of a place, and of each layer.
        depth: the number of layers.
        wrap: put around each layer.
    """
    random = seeded()
    layers = tf.keras.layers
    stack = [
        tf.keras.Sequential(
            [
                layers.Input((length, width)),
                layers.LSTM(width, return_sequences=True),
                layers.LayerNormalization(),
            ]
        )
        for _ in range(depth)
    ]
    head = tf.keras.Sequential([layers.Input((length, width)), layers.Dense(1)])

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        for layer in stack:
            x = wrap(layer)(x)
        return tf.reduce_mean(tf.square(head(x) - y))

    x = random.normal(size=(batch, length, width)).astype(np.float32)
    y = random.normal(size=(batch, length, 1)).astype(np.float32)
    return training_step([*stack, head], loss, x, y)
