"""How long ops take, each kind run for itself."""

import functools

import numpy as np
import tensorflow as tf

from geutil.gradients import Budget, explain
from geutil.memory.op_costs import op_time
from geutil.memory.op_times import op_times
from geutil.memory.read import calls_of
from geutil.memory.sizes import known_dims
from geutil.memory.step_times import op_times_of
from tests.gradients.planning.graphs import chain_loss

v1 = tf.compat.v1


@functools.cache
def graph_of_many():
    """Return the ops of a graph: layers, gradients, sums, randomness, strings."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8, 32, 32, 16])
        w = v1.get_variable("w", [3, 3, 16, 32])
        d = v1.get_variable("d", [3, 3, 32, 1])
        y = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME"))
        y = tf.nn.depthwise_conv2d(y, d, [1, 1, 1, 1], "SAME")
        y = tf.concat([y, tf.nn.dropout(y, 0.5)], -1)
        loss = tf.reduce_mean(tf.reduce_sum(y, axis=[1, 2]) ** 2)
        tf.gradients(loss, [w, d, x])
        tf.strings.length(tf.strings.as_string(y))
    return graph.get_operations()


def test_large_ops_have_times_and_others_none():
    ops = graph_of_many()
    times = op_times(ops, known_dims)
    timed = {op.type for op in ops if op.name in times}
    assert timed >= {
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropFilter",
        "Relu",
        "ReluGrad",
        "ConcatV2",
        "Sum",
    }
    assert not timed & {"Placeholder", "VariableV2", "Const", "StringLength"}
    assert all(seconds > 0 for seconds in times.values())
    (layer,) = [op for op in ops if op.type == "Conv2D"]
    (relu,) = [op for op in ops if op.type == "Relu"]
    assert times[layer.name] > times[relu.name]


def test_what_cannot_be_measured_is_estimated():
    ops = graph_of_many()
    before = len(ops[0].graph.get_operations())
    with ops[0].graph.as_default():
        times = op_times(ops, known_dims)
    assert len(ops[0].graph.get_operations()) == before
    estimated, measured = (op_times_of(ops, {}, measured=m) for m in (False, True))
    other = next(op for op in ops if op.name not in times and op_time(op) > 1000)
    assert estimated(other) == op_time(other)
    # In seconds, next to the estimates of those that can.
    assert 0 < measured(other) < 1 < estimated(other)


def test_loops_take_what_they_run():
    weight = np.ones([64, 64], "f")

    def turn(i, state):
        return i + 1, tf.matmul(state, weight)

    with tf.Graph().as_default() as graph:
        start = [0, v1.placeholder(tf.float32, [64, 64])]
        tf.while_loop(lambda i, _: i < 12, turn, start, maximum_iterations=12)
    (loop,) = (op for op in graph.get_operations() if op.type.endswith("While"))
    ops = graph.get_operations()
    time_of = op_times_of(ops, calls_of(ops), measured=False)
    with tf.Graph().as_default():
        product = tf.matmul(v1.placeholder(tf.float32, [64, 64]), tf.zeros([64, 64]))
    # And the counters.
    assert 12 * op_time(product.op) < time_of(loop) < 12.1 * op_time(product.op)


def test_unknown_shapes_have_no_times(graph):
    tf.tanh(v1.placeholder(tf.float32, [None, 512]))
    assert not op_times(graph.get_operations(), known_dims)


def test_a_budget_with_measured_times():
    @tf.function(autograph=False)
    def trace(x):
        loss = chain_loss(x, 8 * [tf.ones([64, 64])])
        report = explain(loss, x, checkpoints=Budget(0.5, measured=True))
        assert report.peak <= 0.5 * report.plain_peak
        assert 0 < report.extra_time < 1
        return loss

    trace.get_concrete_function(tf.TensorSpec([512, 64]))
