"""Two networks that read characters, with the weights that `train.py` arrived at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.glyphs.drawing import CHANNELS, CHARACTERS, PIXELS

FOLDER = Path(__file__).parent
SHAPE = (PIXELS, PIXELS, CHANNELS)
_PATCH = 4
_WIDTH = 96
_DEPTH = 4
_HEADS = 4
_BATCH = 250

Layer = tf.keras.layers.Layer


def mobilenet(trained: bool = True) -> Any:
    """Return Keras' MobileNetV2, a third as wide, for images [n, 32, 32, 3].

    It halves images five times; so they are doubled first, by repeated pixels, or the
    last layers would see one place. `Resizing` becomes one op that has an int8 kernel,
    where `UpSampling2D` becomes six, some of them without. It gives logits [n, 62].

    Args:
        trained: whether it gets the weights that are kept here.
    """
    image = tf.keras.layers.Input(SHAPE, name="image")
    doubled = tf.keras.layers.Resizing(
        2 * PIXELS, 2 * PIXELS, interpolation="nearest", name="doubled"
    )
    body = tf.keras.applications.MobileNetV2(
        input_tensor=doubled(image),
        alpha=0.35,
        weights=None,
        classes=len(CHARACTERS),
        classifier_activation=None,
    )
    network = tf.keras.Model(image, body.output, name="mobilenet")
    if trained:
        load(network, "mobilenet")
    return network


def vit(trained: bool = True) -> Any:
    """Return a vision transformer for images [n, 32, 32, 3] (Dosovitskiy et al., 2021).

    64 patches of 4x4 pixels, 4 blocks with 4 heads and a width of 96, norms before the
    layers. The mean of all patches is classified. It gives logits [n, 62].

    Args:
        trained: whether it gets the weights that are kept here.
    """
    layers = tf.keras.layers
    image = layers.Input(SHAPE, name="image")
    x = layers.Conv2D(_WIDTH, _PATCH, _PATCH, name="patches")(image)
    x = layers.Reshape((-1, _WIDTH), name="sequence")(x)
    x = Positions(name="positions")(x)
    for index in range(_DEPTH):
        x = _block(x, f"block{index}")
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    x = layers.Dense(len(CHARACTERS), name="logits")(x)
    network = tf.keras.Model(image, x, name="vit")
    if trained:
        load(network, "vit")
    return network


class Positions(Layer):
    """Adds a trained vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.embedding = self.add_weight(
            shape=shape[1:], initializer="truncated_normal", name="embedding"
        )

    def call(self, sequence: Any) -> Any:
        return sequence + self.embedding


def _block(x: Any, name: str) -> Any:
    """Return a sequence after attention and two dense layers, each added to it."""
    layers = tf.keras.layers
    attention = layers.MultiHeadAttention(
        _HEADS, _WIDTH // _HEADS, name=f"{name}_attention"
    )
    y = layers.LayerNormalization(name=f"{name}_norm1")(x)
    x = layers.Add(name=f"{name}_add1")([x, attention(y, y)])
    y = layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = layers.Dense(2 * _WIDTH, "gelu", name=f"{name}_wide")(y)
    y = layers.Dense(_WIDTH, name=f"{name}_narrow")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


NETWORKS: dict[str, Callable[[bool], Any]] = {"mobilenet": mobilenet, "vit": vit}


def load(network: Any, name: str, folder: Path = FOLDER) -> None:
    """Give a network the weights that are kept of it.

    Raises:
        ValueError: they are those of another network.
    """
    with np.load(folder / f"{name}.npz") as kept:
        if set(kept) != {variable.path for variable in network.weights}:
            raise ValueError(f"{name}.npz holds the weights of another network")
        for variable in network.weights:
            variable.assign(kept[variable.path].astype(np.float32))


def keep(network: Any, name: str, folder: Path = FOLDER) -> None:
    """Write the weights of a network, as float16."""
    values = {v.path: np.asarray(v, np.float16) for v in network.weights}
    np.savez_compressed(folder / f"{name}.npz", **values)


def accuracy(call: Callable[[Any], Any], images: Any, labels: Any) -> float:
    """Return how many percent of the images are told right.

    Args:
        call: gives logits [n, 62] of images [n, 32, 32, 3], some hundred at a time.
        images: float32 [count, 32, 32, 3].
        labels: the right places in `CHARACTERS`, int [count].
    """
    told = [
        np.asarray(call(images[start : start + _BATCH])).argmax(-1)
        for start in range(0, len(images), _BATCH)
    ]
    return 100.0 * float((np.concatenate(told) == labels).mean())
