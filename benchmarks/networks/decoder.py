"""A transformer decoder that predicts the next token, as GPT is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.step import Step, Wrap, seeded, training_step, unwrapped


def decoder(
    *,
    batch: int = 2,
    length: int = 128,
    width: int = 256,
    heads: int = 4,
    depth: int = 32,
    vocabulary: int = 4000,
    wrap: Wrap = unwrapped,
) -> Step:
    """Return a step of a decoder that norms what goes into each sublayer.

    Args:
        batch: the number of sequences.
        length: the tokens of each.
        width: the features of a token.
        heads: the attention heads.
        depth: the number of layers.
        vocabulary: the number of tokens.
        wrap: put around each layer.
    """
    random = seeded()
    layers = tf.keras.layers
    tokens_in = layers.Input((length,), dtype="int32")
    embed = tf.keras.Sequential([tokens_in, layers.Embedding(vocabulary, width)])
    stack = [_layer(length, width, heads) for _ in range(depth)]
    head = tf.keras.Sequential(
        [
            layers.Input((length, width)),
            layers.LayerNormalization(),
            layers.Dense(vocabulary),
        ]
    )

    def loss(tokens: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = embed(tokens)
        for layer in stack:
            x = wrap(_training(layer))(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, head(x))
        return tf.reduce_mean(losses)

    tokens = random.integers(vocabulary, size=(batch, length), dtype=np.int32)
    labels = random.integers(vocabulary, size=(batch, length), dtype=np.int32)
    return training_step([embed, *stack, head], loss, tokens, labels)


def _layer(length: int, width: int, heads: int) -> Any:
    layers = tf.keras.layers
    x = layers.Input((length, width))
    normed = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads)
    y = x + attention(normed, normed, use_causal_mask=True)
    z = layers.Dense(4 * width, activation="silu")(layers.LayerNormalization()(y))
    return tf.keras.Model(x, y + layers.Dense(width)(z))


def _training(layer: Any) -> Any:
    return lambda x: layer(x, training=True)
