"""Keras applications, small, with random batch-norm statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import model as geutil_model

CLASSES = 5
_APPS = tf.keras.applications


@dataclass(frozen=True)
class Application:
    """A Keras application.

    Attributes:
        build: its function in `tf.keras.applications`.
        middle: a layer that all paths from the input to the output go through.
        pixels: the height and width of the image.
        options: further arguments of `build`.
    """

    build: Callable[..., Any]
    middle: str
    pixels: int = 32
    options: tuple[tuple[str, Any], ...] = ()


APPLICATIONS = {
    "ResNet50": Application(_APPS.ResNet50, "conv3_block4_out"),
    "MobileNetV2": Application(
        _APPS.MobileNetV2, "block_6_project_BN", options=(("alpha", 0.35),)
    ),
    "MobileNetV3Small": Application(
        _APPS.MobileNetV3Small, "expanded_conv_3_project_bn"
    ),
    "EfficientNetB0": Application(_APPS.EfficientNetB0, "block4a_project_bn"),
    "DenseNet121": Application(_APPS.DenseNet121, "pool3_pool"),
    "InceptionV3": Application(_APPS.InceptionV3, "mixed5", 75),
    "ConvNeXtTiny": Application(
        _APPS.ConvNeXtTiny, "convnext_tiny_downsampling_block_1"
    ),
}


class Network:
    """A Keras application in memory, and on disk as TensorFlow alone saved it."""

    def __init__(self, name: str, folder: Path, lively: bool = True) -> None:
        self.name = name
        self.application = APPLICATIONS[name]
        self.path = folder / name
        pixels = self.application.pixels
        tf.keras.utils.set_random_seed(0)
        self.model = self.application.build(
            weights=None,
            input_shape=(pixels, pixels, 3),
            classes=CLASSES,
            classifier_activation=None,
            **dict(self.application.options),
        )
        if lively:
            enliven(self.model)
        else:
            randomize_statistics(self.model)

    @cached_property
    def saved(self) -> Path:
        """The directory of the network as a SavedModel, with `image` -> `scores`."""
        image = tf.TensorSpec([None, *self.images.shape[1:]], tf.float32, "image")
        module = tf.Module()
        module.model = self.model
        module.serve = tf.function(
            lambda image: {"scores": self.model(image, training=False)}, [image]
        )
        tf.saved_model.save(module, str(self.path), {"serving_default": module.serve})
        return self.path

    @cached_property
    def scores(self) -> np.ndarray:
        """What the SavedModel that geutil never touched computes of `images`."""
        loaded = tf.saved_model.load(str(self.saved))
        serve = loaded.signatures["serving_default"]
        return serve(image=tf.constant(self.images))["scores"].numpy()

    @cached_property
    def opened(self) -> geutil_model.Model:
        """The SavedModel, opened; nobody edits its graph."""
        return geutil_model.open(self.saved)

    @cached_property
    def images(self) -> np.ndarray:
        pixels = self.application.pixels
        random = np.random.default_rng(1)
        return random.uniform(-1, 1, (2, pixels, pixels, 3)).astype(np.float32)

    @cached_property
    def bytes(self) -> np.ndarray:
        """Images of which `images` could be made."""
        return ((self.images + 1) * 127.5).astype(np.uint8)

    @cached_property
    def middle_layer(self) -> Any:
        return self.model.get_layer(self.application.middle)

    @cached_property
    def head(self) -> Any:
        """The Keras model from the image to the middle."""
        return tf.keras.Model(self.model.inputs, self.middle_layer.output)

    @cached_property
    def tail(self) -> Any:
        """The Keras model from the middle to the scores."""
        return tf.keras.Model(self.middle_layer.output, self.model.outputs)

    def middle_of(self, graph: tf.Graph) -> tf.Tensor:
        """Return the tensor that the middle layer computes in a graph."""

        def is_inside(op: tf.Operation) -> bool:
            scopes = op.name.split("/")[:-1]
            wanted = self.application.middle
            return any(
                s == wanted or (s.rpartition("_")[0] == wanted and s[-1].isdigit())
                for s in scopes
            )

        leaving = [
            t
            for op in graph.get_operations()
            if is_inside(op)
            for t in op.outputs
            if any(not is_inside(reader) for reader in t.consumers())
        ]
        assert len(leaving) == 1, leaving
        return leaving[0]


def randomize_statistics(model: Any) -> None:
    """Give moving statistics values of which gradients are well conditioned."""
    random = np.random.default_rng(3)
    for variable in model.variables:
        if variable.path.endswith("moving_mean"):
            variable.assign(random.uniform(-0.2, 0.2, variable.shape))
        elif variable.path.endswith("moving_variance"):
            variable.assign(random.uniform(0.5, 1.5, variable.shape))


def enliven(model: Any) -> None:
    """Give a network statistics and scales with which its output follows its input.

    As they are made, moving statistics are 0 and 1, and the signal dies on the way.
    """
    random = np.random.default_rng(3)
    norms = [
        x for x in model.layers if isinstance(x, tf.keras.layers.BatchNormalization)
    ]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.momentum = 0.0
    if norms:
        images = random.uniform(-1, 1, (8, *model.input_shape[1:]))
        model(images.astype(np.float32), training=True)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
        variance = layer.moving_variance.numpy()
        # A channel that hardly moves in eight images must not rule all others.
        variance = np.maximum(variance, 0.1 * variance.mean())
        shift = random.uniform(-0.2, 0.2, variance.shape) * np.sqrt(variance)
        layer.moving_mean.assign_add(shift)
        layer.moving_variance.assign(
            variance * random.uniform(0.5, 1.5, variance.shape)
        )
    for variable in model.variables:
        if "layer_scale" in variable.path:
            variable.assign(random.uniform(0.2, 0.4, variable.shape))


def evaluate(function: Any, *arguments: Any) -> np.ndarray:
    """Return what a Keras model computes, as a function of TensorFlow."""
    return tf.function(lambda *a: function(*a, training=False))(*arguments).numpy()
