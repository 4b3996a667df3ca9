"""Folds and quantization of one network of a graph: what some outputs depend on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError, QuantizeError, SelectionError
from geutil.quantize import quantize
from tests.settings import needs_eager

v1 = tf.compat.v1
DATA = np.float32(np.random.default_rng(1).normal(size=(4, 8, 8, 3)))


def weights():
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3, 3, 4)), *rng.uniform(0.5, 1.5, size=(4, 4))]
    return [np.float32(value) for value in values]


class Networks:
    """A graph with two networks over one input and the same weights."""

    def __init__(self, *, trained=True):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, 8, 8, 3], name="x")
            self.weights = [
                v1.get_variable(f"w{i}", initializer=w, use_resource=True)
                for i, w in enumerate(weights())
            ]
            read = [w.read_value() for w in self.weights]
            if trained:
                self.first = self._net("first", read, is_training=True)
                self.gradients = tf.gradients(tf.reduce_sum(self.first), read[:2])
            self.second = self._net("second", read, is_training=False)

    def _net(self, scope, read, *, is_training):
        kernel, scale, offset, mean, variance = read
        with tf.name_scope(scope):
            y = tf.nn.conv2d(self.x, kernel, 1, "SAME", name="conv")
            moments = tf.nn.moments(y, [0, 1, 2]) if is_training else (mean, variance)
            y = tf.nn.batch_normalization(y, *moments, offset, scale, 1e-3, name="norm")
            return tf.nn.relu(y, name="relu")

    def values(self, tensors):
        with v1.Session(graph=self.graph) as session, self.graph.as_default():
            session.run(v1.global_variables_initializer())
            return session.run(tensors, {self.x: DATA})


def test_only_the_norms_of_the_outputs_are_folded():
    nets = Networks()
    fetched = [nets.first, *nets.gradients, nets.second]
    before = nets.values(fetched)
    report = fold_batch_norms(nets.graph, outputs=nets.second, strict=True)
    assert [entry.norm for entry in report.folded] == ["second/norm"]
    assert not report.refused
    for old, new in zip(before, nets.values(fetched), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=2e-5 * np.abs(old).max())


@pytest.mark.parametrize("is_training", [True, False])
def test_only_what_outputs_depend_on_is_quantized(is_training):
    nets, alone = Networks(), Networks(trained=False)
    others = [nets.first, *nets.gradients]
    before = nets.values(others)
    found = []
    for each, outputs in ((nets, ["second/relu"]), (alone, [])):
        fold_batch_norms(each.graph, outputs=outputs)
        report = quantize(each.graph, is_training=is_training, outputs=outputs)
        assert report.coverage == 1
        (y,) = each.values([report.tensor(each.second)])
        found.append(y)
    np.testing.assert_array_equal(*found)
    for old, new in zip(before, nets.values(others), strict=True):
        np.testing.assert_array_equal(new, old)
    touched = {op.name for op in nets.graph.get_operations() if "_quant" in op.name}
    assert touched
    assert not any(name.startswith("first/") for name in touched)


def test_gradients_of_what_outputs_depend_on_are_refused():
    nets = Networks()
    with nets.graph.as_default():
        head = tf.nn.relu(tf.reduce_mean(nets.first, [1, 2]), name="head")
    count = len(nets.graph.get_operations())
    with pytest.raises(QuantizeError, match=r"reads 'first/.*, which the outputs"):
        quantize(nets.graph, outputs=head)
    assert len(nets.graph.get_operations()) == count


@pytest.mark.parametrize("client", [fold_batch_norms, quantize])
def test_outputs_of_something_else_are_refused(client):
    with pytest.raises(SelectionError, match="in another graph"):
        client(Networks().graph, outputs=[Networks().second])


@needs_eager
@pytest.mark.parametrize("client", [fold_batch_norms, quantize])
def test_outputs_of_a_model_are_refused(client):
    image = keras.Input([8, 8, 3])
    opened = model.open(keras.Model(image, keras.layers.Conv2D(2, 3)(image)))
    with pytest.raises(ArgumentTypeError, match="cut a model"):
        client(opened, outputs=list(opened.outputs.values()))


@needs_eager
def test_a_graph_of_version_1_in_the_scope_of_a_strategy_has_its_own_variables():
    nets = Networks(trained=False)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        fold_batch_norms(nets.graph)
        report = quantize(nets.graph)
    (found,) = nets.values([report.tensor(nets.second)])
    alone = Networks(trained=False)
    fold_batch_norms(alone.graph)
    (expected,) = alone.values([quantize(alone.graph).tensor(alone.second)])
    np.testing.assert_array_equal(found, expected)


@needs_eager
def test_two_runs_of_a_strategy_in_one_function():
    """The second finds the gradients of the first in its graph."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    layers = keras.layers
    with strategy.scope():
        image = keras.Input([8, 8, 3])
        y = layers.BatchNormalization()(layers.Conv2D(4, 3, use_bias=False)(image))
        net = keras.Model(image, layers.ReLU()(y))
    reports = []

    def train(x):
        loss = tf.reduce_sum(net(x, training=True))
        return tf.gradients(loss, [v.value for v in net.trainable_variables])

    def evaluate(x):
        y = net(x, training=False)
        graph = v1.get_default_graph()
        reports.append(fold_batch_norms(graph, outputs=y, strict=True))
        reports.append(quantize(graph, outputs=y, strict=True))
        return reports[-1].tensor(y)

    @tf.function
    def step(x):
        return strategy.run(train, args=(x,)), strategy.run(evaluate, args=(x,))

    step(tf.constant(DATA))
    assert len(reports[0].folded) == 1
    assert reports[1].coverage == 1
