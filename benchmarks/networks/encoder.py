"""A transformer encoder that predicts a token at each place, as BERT is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks.step import Step, Wrap, seeded, training_step, unwrapped

PADDING = 0


def encoder(
    *,
    batch: int = 4,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    depth: int = 12,
    vocabulary: int = 8000,
    dropout: float = 0.1,
    wrap: Wrap = unwrapped,
) -> Step:
    """Return a step of an encoder whose layers all read one padding mask.

    Args:
        batch: the number of sequences.
        length: the tokens of each, of which the last ones are padding.
        width: the features of a token.
        heads: the attention heads.
        depth: the number of layers.
        vocabulary: the number of tokens; the gradient of their embedding is sparse.
        dropout: the rate of all dropouts.
        wrap: put around each layer.
    """
    random = seeded()
    layers = tf.keras.layers
    tokens_in = layers.Input((length,), dtype="int32")
    embed = tf.keras.Sequential([tokens_in, layers.Embedding(vocabulary, width)])
    place = tf.keras.Sequential(
        [layers.Input((length,), dtype="int32"), layers.Embedding(length, width)]
    )
    features = (length, width)
    ready = tf.keras.Sequential(
        [layers.Input(features), layers.LayerNormalization(), layers.Dropout(dropout)]
    )
    stack = [_layer(features, heads, dropout) for _ in range(depth)]
    head = tf.keras.Sequential([layers.Input(features), layers.Dense(vocabulary)])

    def loss(tokens: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        filled = tf.not_equal(tokens, PADDING)
        mask = filled[:, tf.newaxis, :]
        x = embed(tokens) + place(tf.range(length)[tf.newaxis])
        x = ready(x, training=True)
        for layer in stack:
            x = wrap(_training(layer, mask))(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, head(x))
        weights = tf.cast(filled, losses.dtype)
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)

    tokens = random.integers(1, vocabulary, size=(batch, length), dtype=np.int32)
    for row, end in zip(
        tokens, random.integers(length // 2, length, batch), strict=True
    ):
        row[end:] = PADDING
    labels = random.integers(vocabulary, size=(batch, length), dtype=np.int32)
    return training_step([embed, place, ready, *stack, head], loss, tokens, labels)


def _layer(features: tuple[int, int], heads: int, dropout: float) -> Any:
    layers = tf.keras.layers
    length, width = features
    x = layers.Input(features)
    mask = layers.Input((1, length), dtype="bool")
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
    y = attention(x, x, attention_mask=mask)
    y = layers.LayerNormalization()(x + layers.Dropout(dropout)(y))
    z = layers.Dense(4 * width, activation="gelu")(y)
    z = layers.Dropout(dropout)(layers.Dense(width)(z))
    return tf.keras.Model([x, mask], layers.LayerNormalization()(y + z))


def _training(layer: Any, mask: tf.Tensor) -> Any:
    # Not an argument: `tf.recompute_grad` takes no tensors without a gradient.
    return lambda x: layer([x, mask], training=True)
