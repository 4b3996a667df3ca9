"""Printed digits from training to int8, run by TFLite: how many are told right."""

import string
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.glyphs.drawing import drawings
from examples import int8
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import (
    calibrate,
    compare_int8,
    equalize,
    experimental_create_training_graph,
    quantize,
    reestimate_batch_norm,
    to_int8,
)
from tests.interpreter import run_on_values
from tests.quantize.tiny import of_ranges
from tests.settings import needs_eager, slow
from tests.thorough import chosen, thorough

pytestmark = [needs_eager, slow]

BATCH = 32
COUNT, TRAINED = 4500, 1500


@dataclass(frozen=True)
class Digits:
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def digits():
    """Return images of digits, 8x8 from -1 to 1, and which they are.

    Each is of one of 21 faces, moved by up to half a pixel, with noise.
    """
    random = np.random.default_rng(0)
    drawn = drawings(string.digits)
    faces, y = random.integers(drawn.shape[:2], size=(COUNT, 2)).T
    corners = random.integers(10, 15, size=(COUNT, 2))
    parts = [
        drawn[face, digit, top : top + 40, left : left + 40]
        for face, digit, (top, left) in zip(faces, y, corners, strict=True)
    ]
    x = np.reshape(parts, (COUNT, 8, 5, 8, 5)).mean((2, 4))[..., None]
    x = (2 * x - 1 + random.normal(0, 0.15, x.shape)).astype(np.float32)
    return Digits((x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:]))


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


def train(function, variables, data, epochs, rate):
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


def train_in_graphs(net, prepared, data, epochs, rate):
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


def int8_accuracy(model, data):
    """Return the accuracy of a quantized model, run by TFLite in int8."""
    x, y = data
    (name,), (output,) = model.inputs, model.outputs
    (found,) = run_on_values(to_int8(model), [{name: x}])
    return accuracy(found[output], y)


@dataclass
class Trained:
    """A trained network, its data, and how many percent it tells right."""

    network: Any
    digits: Digits
    weights: list[Any]
    accuracy: float

    def opened(self, **options):
        """Return it as a model: folded and quantized, with the weights of training."""
        self.network.set_weights(self.weights)
        m = model.open(self.network)
        report = fold_batch_norms(m)
        assert (len(report.folded), report.refused) == (4, ())
        assert quantize(m, **options).coverage == 1.0
        return m

    def sample(self):
        chosen = list(batches(self.digits.train, 0))[:8]
        return [{"image": x} for x, _ in chosen]

    def lost(self, m):
        """Return how many points int8 is below float."""
        return self.accuracy - int8_accuracy(m, self.digits.test)


@pytest.fixture(scope="module")
def trained():
    data, net = digits(), network()
    train(
        lambda x: net(x, training=True), net.trainable_variables, data.train, 10, 2e-3
    )
    x, y = data.test
    found = accuracy(net(x, training=False), y)
    assert found > 97.0
    assert len(y) == 3000
    return Trained(net, data, net.get_weights(), found)


def test_int8_does_what_the_simulation_does(trained):
    trained.network.set_weights(trained.weights)
    m = trained.opened(is_training=False)
    calibrate(m, trained.sample())
    comparison = compare_int8(m, to_int8(m), {"image": trained.digits.test[0]})
    (logits,) = comparison.outputs
    assert comparison.float_ops == ()
    assert comparison.samples == 3000
    assert logits.share(1) >= 0.999
    assert logits.most <= 2
    assert logits.agreement == 1.0
    assert trained.lost(m) <= 1.0


def test_eight_bits_trained_with_a_delay_and_reestimated(trained):
    m = trained.opened(is_training=True, ema_decay=0.99, quant_delay=20)
    function, (output,) = m.to_function(), m.outputs
    variables = trained.network.trainable_variables
    data = trained.digits.train
    train(lambda x: function(image=x)[output], variables, data, epochs=1, rate=5e-4)
    assert trained.lost(m) <= 0.5
    report = reestimate_batch_norm(m, trained.sample())
    assert [entry.folded for entry in report.reestimated] == [True] * 4
    calibrate(m, trained.sample())
    assert trained.lost(m) <= 1.0


@pytest.mark.parametrize("statistics", chosen(["exact", "one_pass"], "one_pass"))
@pytest.mark.parametrize(
    ("bits", "points"), [pytest.param(8, 0.5, marks=thorough), (4, 2.0)]
)
def test_trained_with_folded_norms_a_delay_and_a_freeze(
    trained, bits, points, statistics
):
    trained.network.set_weights(trained.weights)
    made = []

    def prepared(logits):
        made.append(
            experimental_create_training_graph(
                logits.graph,
                weight_bits=bits,
                quant_delay=20,
                freeze_bn_delay=60,
                statistics=statistics,
            )
        )
        return made[-1].tensor(logits)

    train_in_graphs(trained.network, prepared, trained.digits.train, 3, 5e-4)
    (report,) = made
    assert len(report.folds.folded) == 4
    assert int(report.step) == 3 * len(list(batches(trained.digits.train, 0)))
    m = model.open(trained.network)
    fold_batch_norms(m)
    evaluated = quantize(
        m, is_training=False, weight_bits=bits, variables=report.variables
    )
    # All ranges of the model are those that were learnt.
    assert evaluated.variables.keys() == of_ranges(report.variables).keys()
    assert trained.lost(m) <= points
    comparison = compare_int8(m, to_int8(m), {"image": trained.digits.test[0]})
    (logits,) = comparison.outputs
    assert comparison.float_ops == ()
    # Of 4 bits the steps of a bias are 17 times as wide.
    assert logits.share(1 if bits == 8 else 2) >= (0.99 if bits == 8 else 0.95)
    assert logits.agreement == 1.0


def test_per_tensor_with_equalization(trained):
    trained.network.set_weights(trained.weights)
    m = model.open(trained.network)
    fold_batch_norms(m)
    report = equalize(m, replace_relu6=True)
    assert any(entry.replaced for entry in report.equalized)
    quantize(m, is_training=False, per_channel=False)
    calibrate(m, trained.sample())
    assert trained.lost(m) <= 1.0


@thorough
def test_the_example(capsys):
    assert int8.main() == 0
    assert "FAILED" not in capsys.readouterr().out
