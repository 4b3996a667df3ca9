"""The networks by name, in the sizes that are measured; tests ask for less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import tensorflow as tf

from benchmarks.networks.decoder import decoder
from benchmarks.networks.encoder import encoder
from benchmarks.networks.recurrent import recurrent
from benchmarks.networks.step import Step, Wrap, seeded, training_step, unwrapped
from benchmarks.networks.unet import unet

# Called with sizes, which differ from network to network.
MakeStep = Callable[..., Step]


def chain(
    *,
    layers: int = 64,
    rows: int = 4096,
    width: int = 1024,
    block: int = 8,
    wrap: Wrap = unwrapped,
) -> Step:
    """Return a step of `layers` times a matmul and a tanh, in blocks of `block`."""
    random = seeded()
    scale = width**-0.5
    variables = [
        tf.Variable(random.normal(size=(width, width), scale=scale), dtype=tf.float32)
        for _ in range(layers)
    ]

    def block_of(weights: list[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
        def call(x: tf.Tensor) -> tf.Tensor:
            for w in weights:
                x = tf.tanh(x @ w)
            return x

        return call

    blocks = [wrap(block_of(variables[i : i + block])) for i in range(0, layers, block)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        for call in blocks:
            x = call(x)
        return tf.reduce_mean(tf.square(x))

    return Step(loss, variables, [], (random.random((rows, width), np.float32),))


def application(
    name: str, *, batch: int = 8, pixels: int = 224, classes: int = 1000
) -> Step:
    """Return a step of a classifier out of `keras.applications`."""
    random = seeded()
    make = getattr(tf.keras.applications, name)
    shape = (pixels, pixels, 3)
    model = make(
        weights=None, input_shape=shape, classes=classes, classifier_activation=None
    )

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = model(images, training=True)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        )

    images = random.normal(size=(batch, *shape)).astype(np.float32)
    labels = random.integers(classes, size=batch, dtype=np.int32)
    return training_step([model], loss, images, labels)


NETWORKS: dict[str, MakeStep] = {
    "chain": chain,
    "ResNet50": partial(application, "ResNet50", batch=16),
    "MobileNetV2": partial(application, "MobileNetV2", batch=16),
    "DenseNet121": partial(application, "DenseNet121"),
    "EfficientNetB0": partial(application, "EfficientNetB0"),
    "U-Net": unet,
    "encoder": encoder,
}
# What is run under many schedules besides.
ALL_NETWORKS: dict[str, MakeStep] = {
    **NETWORKS,
    "ResNet152": partial(application, "ResNet152"),
    "InceptionV3": partial(application, "InceptionV3"),
    "NASNetMobile": partial(application, "NASNetMobile"),
    "ConvNeXtTiny": partial(application, "ConvNeXtTiny"),
    "decoder": decoder,
    "LSTM": recurrent,
}
