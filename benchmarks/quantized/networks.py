"""The networks that are quantized, and what they are calibrated and judged with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import glyphs

CALIBRATION, JUDGED = 32, 64
TIMES = 3
"""How much larger images are than those of glyphs: 96 pixels."""
_CLASSES = 100
_SEED = 3_000_000
"""No epoch of `benchmarks.glyphs.train` has this seed, or those after it."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Subject:
    """A network.

    Attributes:
        name: what it is called in the table.
        network: of Keras, with one input and one output.
        calibration: 32 images.
        judged: 64 others.
        labelled: images and their labels, of a trained one.
    """

    name: str
    network: Any
    calibration: Array
    judged: Array
    labelled: tuple[Array, Array] | None = None

    def __call__(self, images: Array) -> Array:
        """Return what the network makes of images in float32."""
        return self.network(images, training=False).numpy()


# Each with what images from -1 to 1 are multiplied with, and what is added then.
AT_RANDOM: dict[str, tuple[Callable[..., Any], float, float]] = {
    "MobileNetV2": (tf.keras.applications.MobileNetV2, 1.0, 0.0),
    "ResNet50": (tf.keras.applications.ResNet50, 128.0, 0.0),
    "EfficientNetB0": (tf.keras.applications.EfficientNetB0, 127.5, 127.5),
    "DenseNet121": (tf.keras.applications.DenseNet121, 2.0, 0.0),
    "InceptionV3": (tf.keras.applications.InceptionV3, 1.0, 0.0),
}
TRAINED: dict[str, Callable[[], Any]] = {
    "glyphs MobileNetV2": glyphs.mobilenet,
    "glyphs ViT": glyphs.vit,
}
NAMES = (*TRAINED, *AT_RANDOM)


def subjects(names: list[str], count: int) -> Iterator[Subject]:
    """Build networks one by one, so that each can go before the next comes.

    Args:
        names: which ones.
        count: how many labelled images the trained ones get.
    """
    calibration, _ = glyphs.images(CALIBRATION, _SEED)
    judged, _ = glyphs.images(JUDGED, _SEED + 1)
    for name in names:
        tf.keras.backend.clear_session()
        if name in TRAINED:
            network = TRAINED[name]()
            labelled = glyphs.images(count, _SEED + 2)
            yield Subject(name, network, calibration, judged, labelled)
        else:
            _, scale, offset = AT_RANDOM[name]
            larger = [_enlarged(x) * scale + offset for x in (calibration, judged)]
            yield Subject(name, at_random(name, larger[0]), *larger)


def at_random(name: str, images: Array) -> Any:
    """Return a network with random weights, and statistics near those of images.

    With statistics that have nothing to do with the data most of a deep network's
    signal dies on the way.
    """
    tf.keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    make, _, _ = AT_RANDOM[name]
    network = make(
        weights=None,
        input_shape=images.shape[1:],
        classes=_CLASSES,
        classifier_activation=None,
    )
    norms = [
        layer
        for layer in network.layers
        if isinstance(layer, tf.keras.layers.BatchNormalization)
    ]
    for norm in norms:
        norm.momentum = 0.0
        size = norm.moving_mean.shape
        if norm.gamma is not None:
            norm.gamma.assign(random.uniform(0.5, 1.5, size))
        if norm.beta is not None:
            norm.beta.assign(random.normal(0.0, 0.5, size))
    # Without momentum the moving statistics are those of the batch.
    network(images, training=True)
    for norm in norms:
        factor = random.uniform(0.7, 1.4, norm.moving_variance.shape)
        norm.moving_variance.assign(factor * np.asarray(norm.moving_variance))
    return network


def _enlarged(images: Array) -> Array:
    return images.repeat(TIMES, 1).repeat(TIMES, 2)
