"""A network of the blocks of MobileNetV2, traced once for all tests of a worker."""

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge

PIXELS = 16


@dataclass(frozen=True)
class Traced:
    """A Keras network: traced, and copied by geutil into a `tf.Graph` of its own."""

    model: tf.keras.Model
    function: tf.types.experimental.ConcreteFunction
    image: tf.Tensor
    output: tf.Tensor

    @property
    def graph(self):
        return self.image.graph

    @property
    def images(self):
        random = np.random.default_rng(2)
        return random.normal(size=self.image.shape).astype(np.float32)

    def keras_output(self):
        """Return what TensorFlow computes by the function that geutil never touched."""
        (value,) = self.function(tf.constant(self.images))
        return value.numpy()


def randomize_statistics(model):
    random = np.random.default_rng(3)
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            means = layer.moving_mean, layer.moving_variance
            for variable, low, high in zip(means, (-0.2, 0.5), (0.2, 1.5), strict=True):
                variable.assign(random.uniform(low, high, variable.shape))


def trace(model):
    """Trace a model; copy it into a graph with its variables turned to constants."""

    def call(x):
        return [model(x, training=False)]

    function = tf.function(call).get_concrete_function(
        tf.TensorSpec((2, PIXELS, PIXELS, 3))
    )
    values = {id(v.handle): v for v in function.variables}
    inside = function.inputs[-len(function.captured_inputs) :]
    captured = {
        id(t): values.get(id(outer), outer).numpy()
        for outer, t in zip(function.captured_inputs, inside, strict=True)
    }
    graph = tf.Graph()
    with graph.as_default():
        image = tf.compat.v1.placeholder(tf.float32, function.inputs[0].shape, "image")
        pairs = [(function.inputs[0], image)]
        for t in inside:
            if t.dtype != tf.resource:
                pairs.append((t, tf.constant(captured[id(t)])))
        for read in ge.filter_ops(function.graph, ge.op_type("ReadVariableOp")):
            pairs.append((read.outputs[0], tf.constant(captured[id(read.inputs[0])])))
    ops = ge.get_backward_walk_ops(function.outputs, stop_at_ts=[t for t, _ in pairs])
    _, info = ge.copy_with_input_replacements(ops, pairs, dst_graph=graph)
    return Traced(model, function, image, info.transformed(function.outputs[0]))


def inverted_residual(x, block):
    """Return a block of MobileNetV2: expanded, convolved by channel, projected."""
    layers, y = tf.keras.layers, x
    for make in (
        layers.Conv2D(24, 1, use_bias=False),
        layers.DepthwiseConv2D(3, padding="same", use_bias=False),
    ):
        y = layers.ReLU(6.0)(layers.BatchNormalization()(make(y)))
    y = layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(y))
    return layers.Add(name=f"block_{block}_add")([x, y])


@pytest.fixture(scope="session")
def mobilenet():
    tf.keras.utils.set_random_seed(0)
    image = tf.keras.Input([PIXELS, PIXELS, 3])
    x = tf.keras.layers.Conv2D(8, 3, strides=2, use_bias=False)(image)
    for block in range(5):
        x = inverted_residual(x, block)
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    model = tf.keras.Model(image, tf.keras.layers.Dense(7, activation="softmax")(x))
    randomize_statistics(model)
    return trace(model)
