"""Training with simulated quantization in version 1 graphs, step by step."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import verify
from geutil.quantize import insert_quant_op, quantize
from tests.quantize.tiny import (
    Layer,
    Reference,
    averaged,
    check_fake_quant,
    close,
    ends,
    fake_quants,
    of_ranges,
    session,
    symmetric_ends,
)
from tests.thorough import crossed

v1 = tf.compat.v1
RANDOM = np.random.default_rng(0)
W1 = np.float32(RANDOM.normal(size=(5, 6)))
B1 = np.float32(RANDOM.normal(size=6))
W2 = np.float32(RANDOM.normal(size=(6, 3)))
STEPS = [np.float32(RANDOM.normal(size=(8, 5)) * 2) for _ in range(5)]
RATE = 0.01
ENDS = ("min", "max", "learnt")


def _variable(name, value, resource=True):
    return v1.get_variable(name, initializer=value, use_resource=resource)


class Net:
    """Two dense layers, the first with a bias and a Relu, in a new graph."""

    def __init__(self, resource=True):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, 5], "x")
            self.w1 = _variable("one/weights", W1, resource)
            self.b1 = _variable("one/bias", B1, resource)
            self.w2 = _variable("two/weights", W2, resource)
            y = tf.matmul(self.x, self.w1, name="one/product")
            self.hidden = tf.nn.relu(tf.nn.bias_add(y, self.b1), name="one/relu")
            self.logits = tf.matmul(self.hidden, self.w2, name="two/product")

    def quantize(self, **options):
        self.report = quantize(self.graph, **options)
        verify(self.graph)
        self.out = self.report.tensor(self.logits)
        return self

    def train(self):
        with self.graph.as_default():
            self.loss = tf.reduce_sum(self.out**2) / 8
            optimizer = v1.train.GradientDescentOptimizer(RATE)
            self.step = optimizer.minimize(self.loss)
        return self


def _names(*names):
    return [f"{name}/{end}" for name in names for end in ("min", "max")]


RANGES = ["x/input_quant", "one/act_quant", "two/act_quant"]
WEIGHTS = ["one/weights_quant", "two/weights_quant"]


def _reference(decay=0.999, per_channel=True):
    layers = [Layer("one", W1, B1), Layer("two", W2, relu=False)]
    return Reference(layers, RATE, decay, per_channel, count=8)


def _compare(opened, net, reference):
    for name, expected in reference.ranges.items():
        values = opened.run([net.report.variables[n] for n in _names(name)])
        close(values, expected, 2e-6)
    variables = [net.w1, net.b1, net.w2]
    one, two = reference.layers
    expected = [one.w, one.b, two.w]
    for value, wanted in zip(opened.run(variables), expected, strict=True):
        close(value, wanted, 2e-6)


@pytest.mark.parametrize(
    ("per_channel", "resource", "decay"),
    crossed([True, False], [True, False], [0.999, 0.5], together=1),
)
def test_steps_are_those_of_numpy(per_channel, resource, decay):
    net = Net(resource).quantize(per_channel=per_channel, ema_decay=decay).train()
    reference = _reference(decay, per_channel)
    with session(net.graph) as opened:
        for x in STEPS:
            value, _ = opened.run([net.out, net.step], {net.x: x})
            close(value, reference.step(x), 2e-6)
            _compare(opened, net, reference)


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
def test_a_delay_of_three(resource):
    """The third step is the first to round."""
    net = Net(resource).quantize(quant_delay=3, ema_decay=0.9).train()
    plain = Net(resource)
    plain.out = plain.logits
    plain.train()
    reference = _reference(0.9)
    with session(net.graph) as opened, session(plain.graph) as other:
        for index, x in enumerate(STEPS):
            value, _ = opened.run([net.out, net.step], {net.x: x})
            expected = reference.step(x, rounds=index + 1 >= 3)
            if index + 1 < 3:
                # To the last bit what it would be without.
                float_value, _ = other.run([plain.out, plain.step], {plain.x: x})
                np.testing.assert_array_equal(value, float_value)
                np.testing.assert_array_equal(opened.run(net.w1), other.run(plain.w1))
            close(value, expected, 2e-6)
            # Learnt from the first step on.
            _compare(opened, net, reference)
            assert opened.run(net.report.step) == index + 1


def test_below_zero_is_looked_only_where_something_may_be():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [1, 4, 4, 2])
        y = tf.nn.relu6(x)
        rounded = tf.quantization.fake_quant_with_min_max_args(y)
        never = [y, tf.reshape(rounded, [-1]), tf.nn.softmax(x), tf.abs(x)]
        maybe = [x, -y, y - 1.0, y + x, tf.nn.elu(x), tf.nn.max_pool2d(x, 2, 2, "SAME")]
        never.append(tf.nn.max_pool2d(y, 2, 2, "SAME"))
        for n, t in enumerate([*never, *maybe]):
            read = [tf.identity(t).op]
            insert_quant_op("", f"range_{n}", t.op, read, is_training=True)
    searched = [op.inputs[0] for op in graph.get_operations() if op.type == "Min"]
    assert {t.name for t in searched} == {t.name for t in maybe}


# -- ranges that are shared ------------------------------------------------------------


def test_what_a_concat_reads_and_makes_has_one_range_that_is_updated_once():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5])
        a = tf.nn.relu(tf.matmul(x, W1), name="a/relu")
        b = tf.tanh(tf.matmul(x, W1 * 3)) * 2.0
        b = tf.matmul(b, tf.constant(W1.T @ W1), name="b/product")
        y = tf.concat([a, b], 1, name="concat")
        out = tf.matmul(y, tf.constant(np.vstack([W1.T, W1.T])), name="last")
    report = quantize(graph, ema_decay=0.5)
    result = report.tensor(out)
    joined = report.tensor(y)
    for t in (a, b):
        # A step reads them before their range has moved, since one may need another.
        assert report.tensor(t).op.inputs[1].op.type == "ReadVariableOp"
    (entry,) = [e for e in report.quantized if e.op == "concat"]
    assert entry.into == joined.name
    names = _names(entry.result_range)
    with session(graph) as opened:
        pair = [report.variables[name] for name in names]
        seen = []
        for data in STEPS:
            _, av, bv, yv, quantized = opened.run([result, a, b, y, joined], {x: data})
            lows, highs = zip(ends(av), ends(bv), strict=True)
            seen.append((min(lows), max(highs)))
            expected = averaged(seen, 0.5)
            close(opened.run(pair), expected)
            check_fake_quant(quantized, yv, *expected)


def test_a_weight_that_two_layers_share_has_one_range():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4, 4, 3])
        w = v1.get_variable("w", [1, 1, 3, 3], use_resource=True)
        y = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME", name="a/conv"))
        z = tf.nn.relu(tf.nn.conv2d(y, w, 1, "SAME", name="b/conv"))
    report = quantize(graph)
    weights = {e.weights_range for e in report.quantized if e.weights}
    assert weights == {"a/weights_quant"}
    updates = [op for op in graph.get_operations() if op.type == "AssignVariableOp"]
    updates = [op for op in updates if "weights_quant/range" in op.name]
    assert [op.inputs[0].op.name for op in updates] == _names("a/weights_quant")
    with session(graph) as opened:
        opened.run(report.tensor(z), {x: np.ones((1, 4, 4, 3))})
        value = opened.run(w)
        pair = opened.run([report.variables[n] for n in _names("a/weights_quant")])
        size = np.abs(value).max((0, 1, 2))
        close(pair, [-size, size])


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
def test_partitioned_variables_have_one_range(resource):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8])
        with v1.variable_scope("layer", use_resource=resource):
            w = v1.get_variable(
                "w", [8, 3], partitioner=v1.fixed_size_partitioner(4, axis=0)
            )
            y = tf.nn.relu(tf.matmul(x, w, name="product"))
    report = quantize(graph)
    weights = [e for e in report.quantized if e.weights]
    assert [e.weights_range for e in weights] == ["layer/weights_quant"]
    assert report.coverage == 1.0
    with session(graph) as opened:
        opened.run(report.tensor(y), {x: np.ones((2, 8))})
        value = np.concatenate(opened.run(list(w)))
        pair = opened.run([report.variables[n] for n in _names("layer/weights_quant")])
        close(pair, symmetric_ends(value, 0))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
def test_ops_of_a_range_stand_where_it_is_used(resource, is_training):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5], "x")
        w = _variable("w", W1, resource)
        with tf.device("/device:CPU:1"):
            y = tf.nn.relu(tf.matmul(x, w, name="one/product"), name="one/relu")
        with tf.device("/device:CPU:2"):
            y = tf.multiply(y, _variable("b", B1, resource), name="two/scaled")
            tf.matmul(y, tf.constant(W2), name="two/product")
    quantize(graph, is_training=is_training, quant_delay=3 if is_training else None)
    places = {"one": "/device:CPU:1", "x": "/device:CPU:1", "two": "/device:CPU:2"}
    made = [op for op in graph.get_operations() if "_quant/" in op.name]
    made = [op for op in made if not op.name.split("_quant/")[1].startswith(ENDS)]
    assert len(fake_quants(graph)) >= 6
    for op in made:
        assert op.device == places[op.name.partition("/")[0]], op.name
    for op in fake_quants(graph):
        with graph.as_default():
            (gradient,) = tf.gradients(op.outputs[0], op.inputs[0])
        assert gradient.op.device == op.device


# -- towers ----------------------------------------------------------------------------


def test_towers_share_ranges_that_are_given():
    graph, outs = tf.Graph(), []
    with graph.as_default():
        w = _variable("w", W1)
        xs = [v1.placeholder(tf.float32, [None, 5]) for _ in range(2)]
        for index, x in enumerate(xs):
            with tf.name_scope(f"tower_{index}"):
                outs.append(tf.nn.relu(tf.matmul(x, w, name="product"), name="relu"))
    first = quantize(graph, scope="tower_0", ema_decay=0.5)
    given = {n.replace("tower_0", "tower_1"): v for n, v in first.variables.items()}
    second = quantize(graph, scope="tower_1", ema_decay=0.5, variables=given)
    assert set(second.variables) <= set(given)
    assert any(name.endswith("/learnt") for name in second.variables)
    assert all(second.variables[name] is given[name] for name in second.variables)
    names = [v.op.name for v in graph.get_collection("variables")]
    assert names == ["w", *first.variables]
    with session(graph) as opened:
        for data in STEPS:
            for scale, out, x in zip((1, 2), outs, xs, strict=True):
                before = opened.run(list(of_ranges(first.variables).values()))
                opened.run(first.tensor(out), {x: data * scale})
                after = opened.run(list(of_ranges(first.variables).values()))
                assert not np.allclose(np.hstack(before), np.hstack(after))


def test_ranges_start_so_and_fetching_what_is_not_quantized_learns_nothing():
    net = Net().quantize()
    variables = net.report.variables
    counts = [f"{name}/learnt" for name in RANGES]
    assert sorted(variables) == sorted([*_names(*RANGES, *WEIGHTS), *counts])
    with session(net.graph) as opened:
        before = opened.run(dict(variables))
        for name, expected in zip(RANGES, ((-6, 6), (0, 6), (-6, 6)), strict=True):
            assert tuple(before[end] for end in _names(name)) == expected
        opened.run([net.x, net.w1, net.b1], {net.x: STEPS[0]})
        after = opened.run(dict(variables))
    np.testing.assert_equal(after, before)
