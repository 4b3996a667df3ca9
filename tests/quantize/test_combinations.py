"""Layers, norms, variables and activations, point by point against float64.

| dimension | values | where |
|---|---|---|
| layer | conv, dense, depthwise, separable, atrous | tests |
| norm | fused, unfused, none | tests |
| variables | resource, ref, constant | tests |
| statistics | exact, one_pass | tests |
| per channel | with, without | tests |
| activation | relu, relu6, none | nets of a graph |
| bypass | with, without | nets of a graph |
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.quantize.tiny import (
    check_fake_quant,
    close,
    ends,
    fake_quants,
    session,
    symmetric_ends,
    types,
)
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

v1 = tf.compat.v1
SIZE = 4
"""Channels of data and results."""
EPSILON = 0.1
ACTIVATIONS = {
    "relu": (tf.nn.relu, lambda x: np.maximum(x, 0)),
    "relu6": (tf.nn.relu6, lambda x: np.clip(x, 0, 6)),
    "none": (None, lambda x: x),
}


def _depthwise(x, w, name="op"):
    return tf.raw_ops.DepthwiseConv2dNative(
        input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", name=name
    )


def _conv(x, w):
    return tf.nn.conv2d(x, w, 1, "SAME", name="op")


def _atrous(x, w):
    spread = tf.space_to_batch(x, [2, 2], [[2, 2], [2, 2]])
    y = tf.nn.conv2d(spread, w, 1, "VALID", name="op")
    return tf.raw_ops.BatchToSpaceND(
        input=y, block_shape=[2, 2], crops=[[0, 0], [0, 0]]
    )


# The shape of the weights, and what the op that the norm is folded into makes.
LAYERS = {
    "conv": ([3, 3, SIZE, SIZE], _conv),
    "dense": ([SIZE, SIZE], lambda x, w: tf.matmul(x, w, name="op")),
    "depthwise": ([3, 3, SIZE, 1], _depthwise),
    "separable": ([1, 1, SIZE, SIZE], _conv),
    "atrous": ([3, 3, SIZE, SIZE], _atrous),
}


@dataclass
class Net:
    """A net in the default graph, below the current name scope.

    Attributes:
        layer: which layer.
        norm: "fused", "unfused" or "none", which is a bias.
        variables: "resource", "ref" or "constant".
        activation: which activation.
        bypass: whether the input is added before it.
        seed: of the random values.
    """

    layer: str
    norm: str
    variables: str
    activation: str
    bypass: bool
    seed: int

    def build(self):
        self.random = np.random.default_rng(self.seed)
        shape = [8, SIZE] if self.layer == "dense" else [2, 6, 6, SIZE]
        self.data = np.float32(self.random.normal(size=shape) * 2)
        self.x = v1.placeholder(tf.float32, [None, *shape[1:]], "x")
        shape, self.apply = LAYERS[self.layer]
        y = self.x
        with tf.name_scope("layer"):
            if self.layer == "separable":
                first = self.random.normal(size=[3, 3, SIZE, 1])
                y = _depthwise(y, self._parameter(first), "first")
            self.kernel = self.random.normal(size=shape)
            y = self.apply(y, self._parameter(self.kernel))
        y = self._normalized(y)
        with tf.name_scope("end"):
            y = tf.add(y, self.x, name="sum") if self.bypass else y
            activation = ACTIVATIONS[self.activation][0]
            self.out = y if activation is None else activation(y, name="activation")
            if self.norm == "fused" and self.out is y and not self.bypass:
                # Of a norm that nothing reads only the statistics would count.
                self.out = tf.identity(y)
        return self

    def _parameter(self, values):
        values = np.float32(values)
        if self.variables == "constant":
            return tf.constant(values)
        resource = self.variables == "resource"
        return v1.Variable(values, use_resource=resource)

    def _normalized(self, y):
        self.beta, self.gamma = self.random.normal(size=SIZE), self._positive()
        with tf.name_scope("norm"):
            if self.norm == "none":
                return tf.nn.bias_add(y, self._parameter(self.beta))
            self.moving_mean, self.moving = (
                self.random.normal(size=SIZE),
                self._positive(),
            )
            beta, gamma = self._parameter(self.beta), self._parameter(self.gamma)
            if self.norm == "fused":
                flat = tf.reshape(y, [-1, 1, 1, SIZE]) if self.layer == "dense" else y
                z, mean, variance = v1.nn.fused_batch_norm(
                    flat, gamma, beta, epsilon=EPSILON
                )
                z = tf.reshape(z, [-1, SIZE]) if self.layer == "dense" else z
            else:
                mean, variance = tf.nn.moments(y, list(range(len(y.shape) - 1)))
                z = tf.nn.batch_normalization(y, mean, variance, beta, gamma, EPSILON)
            for values, batch in ((self.moving_mean, mean), (self.moving, variance)):
                # Even a net of constants keeps averages, which do not move here.
                kept = v1.Variable(
                    np.float32(values),
                    trainable=False,
                    use_resource=self.variables != "ref",
                )
                v1.assign_sub(kept, (kept - batch) * 0.0)
        return z

    def _positive(self):
        return self.random.uniform(0.5, 2.0, SIZE)

    # -- what it shall compute ---------------------------------------------------------

    def _applied(self, x, w):
        """Return what TensorFlow's kernel makes in float64."""
        return self.apply(tf.constant(np.float64(x)), np.float64(w)).numpy()

    def weights(self):
        """Return the weights as they are quantized: folded with moving statistics."""
        if self.norm == "none":
            return np.float32(self.kernel)
        factor = self.gamma / np.sqrt(self.moving + EPSILON)
        axis = [-1, 1] if self.layer == "depthwise" else [-1]
        return self.kernel * factor.reshape(axis)

    def result(self, x, w, old_x, statistics):
        """Return what the layer and its norm make.

        Args:
            x: what the folded layer reads.
            w: its weights.
            old_x: what the layer reads that makes the statistics, if they are exact.
            statistics: "exact" or "one_pass".
        """
        y = self._applied(x, w)
        if self.norm == "none":
            return y + self.beta
        if statistics == "exact":
            batch = self._applied(old_x, self.kernel)
        else:
            batch = y * (np.sqrt(self.moving + EPSILON) / self.gamma)
        axes = tuple(range(batch.ndim - 1))
        deviation = np.sqrt(batch.var(axes) + EPSILON)
        shift = self.beta - batch.mean(axes) * self.gamma / deviation
        return y * (np.sqrt(self.moving + EPSILON) / deviation) + shift

    def activated(self, y):
        return ACTIVATIONS[self.activation][1](y)


def _nets(*case):
    nets = {}
    for activation, bypass in itertools.product(ACTIVATIONS, [True, False]):
        name = f"{activation}_{'bypass' if bypass else 'plain'}"
        with tf.name_scope(name):
            nets[name] = Net(*case, activation, bypass, seed=len(nets)).build()
    return nets


def _points(graph, scope, report):
    """Return what to fetch of each FakeQuant op below a scope.

    By the last part of the name of its range: what it reads, the result that others
    read, and the ends.
    """
    points = {}
    for op in fake_quants(graph):
        if op.name.startswith(f"{scope}/"):
            source = op.inputs[0]
            if source.op.type == "Reshape" and op.type.endswith("PerChannel"):
                source = source.op.inputs[0]
            slot = op.name.removeprefix(f"{scope}/").rpartition("/")[0]
            points[slot] = source, report.tensor(source), *op.inputs[1:]
    return points


def _layer(graph, scope, net):
    """Return what the layer for the statistics reads, and the other and its weights."""
    old = new = graph.get_operation_by_name(f"{scope}/layer/op")
    if net.norm != "none":
        new = graph.get_operation_by_name(f"{scope}/layer/op_fold")
    return _data_of(old), _data_of(new), new.inputs[1]


def _data_of(op):
    """Return what a layer reads; before it is spread for an atrous convolution."""
    x = op.inputs[0]
    return x.op.inputs[0] if x.op.type == "SpaceToBatchND" else x


def _slots(net):
    """Return the slots of weights, of the layer's result, and of the last one."""
    # Both halves of a separable one are in one scope, so that whole names tell them
    # apart; a fused norm of a dense layer is followed by a Reshape, and not by the sum.
    separable = net.layer == "separable"
    weights = "layer/op/weights_quant" if separable else "layer/weights_quant"
    if not net.bypass:
        made = "layer/op/act_quant" if separable else "layer/act_quant"
        return weights, made, made
    reshaped = net.layer == "dense" and net.norm == "fused"
    made = "layer/act_quant" if reshaped else "layer/conv_quant"
    return (
        weights,
        made,
        "end/add_quant" if net.activation == "none" else "end/act_quant",
    )


def _expected_slots(net):
    slots = {"input_quant", *_slots(net)}
    if net.layer == "separable":
        first = "layer/first/act_quant" if not net.bypass else "layer/act_quant"
        slots |= {"layer/first/weights_quant", first}
    return slots


def _check_points(net, fetched, per_channel):
    for slot, (source, result, low, high) in fetched.items():
        weights = slot.endswith("weights_quant")
        if weights:
            axes = {"dense": (0,)}.get(net.layer, (0, 1, 2))
            if source.shape[-1] == 1:
                # The channels of a depthwise convolution are two axes.
                axes = (0, 1, 3)
            close([low, high], symmetric_ends(source, axes if per_channel else None))
        else:
            close([low, high], ends(source))
        if low.size == SIZE and source.shape[-1] == 1:
            low, high = low.reshape(SIZE, 1), high.reshape(SIZE, 1)
        check_fake_quant(result, source, low, high, 8, weights)


def _check_values(net, fetched, made):
    """Check what stands before the FakeQuant ops."""
    weights, layer, last = _slots(net)
    close(fetched[weights][0], net.weights(), 2e-6)
    source, result, _, _ = fetched[layer]
    if net.bypass:
        close(source, made.reshape(source.shape), 1e-5)
        total = result.reshape(-1, *net.data.shape[1:]) + fetched["input_quant"][1]
        close(fetched[last][0], net.activated(total))
    else:
        close(source, net.activated(made).reshape(source.shape), 1e-5)


@pytest.mark.parametrize(
    ("layer", "norm", "variables", "statistics", "per_channel"),
    crossed(
        LAYERS,
        ["fused", "unfused", "none"],
        ["resource", "ref", "constant"],
        ["exact", "one_pass"],
        [True, False],
        together=1,
    ),
)
def test_points_and_values(layer, norm, variables, statistics, per_channel):
    with tf.Graph().as_default() as graph:
        nets = _nets(layer, norm, variables)
    folds = fold_batch_norms(graph, is_training=True, statistics=statistics)
    assert len(folds.folded) == (0 if norm == "none" else len(nets))
    report = quantize(graph, per_channel=per_channel)
    verify(graph)
    assert (report.coverage, report.skipped) == (1.0, ())
    # Without a delay nothing chooses whether to quantize; folds choose among scales.
    choosing = [op.name for op in graph.get_operations() if op.type == "SelectV2"]
    assert all("training_fold" in name for name in choosing)
    assert "AssignAddVariableOp" not in types(graph)
    fetches = {
        name: (_points(graph, name, report), _layer(graph, name, net))
        for name, net in nets.items()
    }
    with session(graph) as opened:
        values = opened.run(fetches, {net.x: net.data for net in nets.values()})
    for name, net in nets.items():
        fetched, (old_x, x, w) = values[name]
        assert set(fetched) == _expected_slots(net), name
        _check_points(net, fetched, per_channel)
        _check_values(net, fetched, net.result(x, w, old_x, statistics))
