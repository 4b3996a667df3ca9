"""The networks of the benchmarks, small enough for tests, and smaller ones of Keras."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from benchmarks.networks import NETWORKS, Step

# Of 32 pixels the last blocks would see a single one: batch norm over the two images
# would leave hardly any gradient.
SMALL: dict[str, dict[str, Any]] = {
    "chain": {"layers": 12, "rows": 8, "width": 16, "block": 4},
    "ResNet50": {"batch": 2, "pixels": 64, "classes": 7},
    "MobileNetV2": {"batch": 2, "pixels": 64, "classes": 7},
    "DenseNet121": {"batch": 2, "pixels": 64, "classes": 7},
    "EfficientNetB0": {"batch": 2, "pixels": 64, "classes": 7},
    "U-Net": {"batch": 2, "pixels": 32, "width": 4},
    "encoder": {
        "batch": 2,
        "length": 16,
        "width": 32,
        "heads": 4,
        "depth": 3,
        "vocabulary": 50,
    },
}


@cache
def small_step(name: str) -> Step:
    """Return the training step of a small network, the same one at each call."""
    return NETWORKS[name](**SMALL[name])


@dataclass(frozen=True)
class Forward:
    """The forward part of a step in a graph of its own.

    Attributes:
        step: the step.
        graph: where the loss was traced.
        batch: the placeholders.
        loss: the loss.
        xs: the variables, to differentiate by.
    """

    step: Step
    graph: tf.Graph = field(repr=False)
    batch: list[tf.Tensor] = field(repr=False)
    loss: tf.Tensor

    @property
    def xs(self) -> list[tf.Variable]:
        return self.step.variables


def trace_forward(step: Step) -> Forward:
    """Return the step's forward part, traced anew and never built.

    So a test may edit the graph. To run what it makes, a test calls `step.loss` in a
    `tf.function` instead.
    """
    graph = tf.__internal__.FuncGraph("forward")
    with graph.as_default():
        batch = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in step.specs]
        return Forward(step, graph, batch, step.loss(*batch))


def convolution(x: Any, width: int, activation: str | None = None) -> Any:
    """Return a convolution whose kernels take next to no memory for themselves.

    Eigen's gradients of a Conv2D, which run where oneDNN does not, take some 30 MB
    however small it is: more than the rest of these networks.
    """
    if x.shape[-1] == width:
        layer = keras.layers.DepthwiseConv2D(3, padding="same", activation=activation)
    else:
        layer = keras.layers.Dense(width, activation)
    return layer(x)


def residual(
    side: int, width: int = 8, activations: Sequence[str] = 4 * ("relu",)
) -> keras.Model:
    """Return convolutions with batch norms and activations, and ways around them."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input([side, side, 3])
    for activation in activations:
        y = convolution(x, width)
        y = keras.layers.BatchNormalization()(y)
        y = keras.layers.Activation(activation)(y)
        x = y if x.shape[-1] != width else keras.layers.Add()([x, y])
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def convolutions(
    side: int,
    blocks: Sequence[tuple[int, int]],
    pool: Callable[[], keras.layers.Layer] = keras.layers.MaxPooling2D,
) -> keras.Model:
    """Return blocks, each of a width and a number of convolutions, and their pools."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input([side, side, 3])
    for width, count in blocks:
        for _ in range(count):
            x = convolution(x, width, "relu")
        x = pool()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def with_skips(side: int) -> keras.Model:
    """Return an encoder, and a decoder that reads all of it."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input([side, side, 3])
    skips = []
    for width in (8, 16):
        skips.append(convolution(x, width, "relu"))
        x = keras.layers.MaxPooling2D()(skips[-1])
    x = convolution(x, 32, "relu")
    for width in (16, 8):
        x = keras.layers.UpSampling2D()(keras.layers.Dense(width)(x))
        x = keras.layers.Concatenate()([x, skips.pop()])
        x = convolution(x, width, "relu")
    return keras.Model(inputs, keras.layers.Dense(10)(x))
