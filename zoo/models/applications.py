"""One network of each family of keras.applications, small images, few classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from zoo.subject import Function, of_keras, uniform

# The least size that the family takes, or close to it.
_SIZES = {
    "InceptionV3": 75,
    "InceptionResNetV2": 75,
    "Xception": 71,
    "NASNetMobile": 32,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "MobileNet": {"alpha": 0.25},
    "MobileNetV2": {"alpha": 0.35},
    "MobileNetV3Small": {"minimalistic": False},
}
NAMES = (
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "ResNet50",
    "ResNet50V2",
    "DenseNet121",
    "InceptionV3",
    "InceptionResNetV2",
    "Xception",
    "NASNetMobile",
    "VGG16",
    "ConvNeXtTiny",
)


def _application(name: str) -> Function:
    make = getattr(tf.keras.applications, name)
    size = _SIZES.get(name, 32)
    options = dict(_OPTIONS.get(name, {}))
    if "include_preprocessing" in inspect.signature(make).parameters:
        options["include_preprocessing"] = False
    network = make(
        weights=None,
        input_shape=(size, size, 3),
        classes=10,
        classifier_activation=None,
        **options,
    )
    name_of_input = network.inputs[0].name
    return of_keras(network, {name_of_input: uniform(-1.0, 1.0)})


BUILDERS: dict[str, Callable[[], Function]] = {
    name: partial(_application, name) for name in NAMES
}
