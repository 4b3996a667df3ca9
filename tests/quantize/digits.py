"""Handwritten digits, which ship with scikit-learn, and a small network for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from geutil.quantize import to_int8
from geutil.quantize.int8.running import Runner

BATCH = 32


@dataclass(frozen=True)
class Digits:
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def digits():
    """Return the digits as images of 8x8 from -1 to 1, split by turns, two to one."""
    data = load_digits()
    x = (data.images[..., None] / 8 - 1).astype(np.float32)
    y = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    split = 2 * len(x) // 3
    first, second = order[:split], order[split:]
    return Digits((x[first], y[first]), (x[second], y[second]))


def network():
    """Return a Keras network: convolutions with batch norms, plain and separable."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    x = image = layers.Input((8, 8, 1), name="image")
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = left = layers.ReLU()(x)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU(6.0)(x)
    x = layers.Conv2D(16, 1, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Add()([x, left])
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(32, 3, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(image, layers.Dense(10, name="logits")(x))


def batches(data, seed, size=BATCH):
    """Yield the batches of an epoch."""
    x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    for start in range(0, len(x) - size + 1, size):
        chosen = order[start : start + size]
        yield x[chosen], y[chosen]


def train(function: Any, variables: Any, data: Any, epochs: int, rate: float) -> None:
    """Train what a function computes, under a GradientTape.

    Args:
        function: the logits of a batch of images.
        variables: what is trained.
        data: images and labels.
        epochs: how often to go through them.
        rate: the learning rate.
    """

    def gradients(loss_of, x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, function(x))
        return tape.gradient(loss, variables)

    _descend(gradients, variables, data, epochs, rate)


def train_in_graphs(
    net: Any, prepared: Any, data: Any, epochs: int, rate: float
) -> None:
    """Train a network as `train` does, by gradients that are built in the graph.

    `prepared` is given the logits while the step is traced, and returns those to
    train by.
    """
    variables = net.trainable_variables

    def gradients(loss_of, image, label):
        loss = loss_of(label, prepared(net(image, training=True)))
        return tf.gradients(loss, [v.value for v in variables])

    _descend(gradients, variables, data, epochs, rate)


def _descend(gradients, variables, data, epochs, rate):
    optimizer = tf.keras.optimizers.Adam(rate)
    optimizer.build(variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # The argument is called as the network's input is, and so is its range.
    @tf.function(autograph=False)
    def step(image, label):
        found = gradients(loss_of, image, label)
        optimizer.apply_gradients(zip(found, variables, strict=True))

    for epoch in range(epochs):
        for x, y in batches(data, epoch):
            step(tf.constant(x), tf.constant(y))


def accuracy(logits, labels):
    """Return how many percent of the labels are found."""
    return 100.0 * float((np.asarray(logits).argmax(-1) == labels).mean())


def int8_accuracy(model: Any, data: Any) -> float:
    """Return the accuracy of a quantized model, run by TFLite in int8."""
    x, y = data
    (name,), (output,) = model.inputs, model.outputs
    runner = Runner(to_int8(model), [name], [output])
    return accuracy(runner.run(runner.stored({name: x}))[output], y)
