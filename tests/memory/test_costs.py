"""Multiply-adds against TensorFlow's profiler and numbers by hand; times of ops."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.gradients import Budget, explain
from geutil.memory.costs import (
    measured_times,
    multiply_adds,
    negligible_bytes,
    op_time,
    op_times,
    raw_call,
    tensor_bytes,
    tensor_elements,
)
from geutil.memory.read import calls_of
from tests.gradients.graphs import chain_loss

v1 = tf.compat.v1


def zeros(*shape):
    return tf.constant(0.0, shape=shape)


def profiled(graph):
    """Return half the floating-point operations that TensorFlow's profiler counts."""
    options = v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    found = v1.profiler.profile(graph, cmd="op", options=options)
    return found.total_float_ops // 2


def product(one, other, **options):
    return tf.matmul(zeros(*one), zeros(*other), **options)


def weights_of(kernel):
    return kernel if tf.is_tensor(kernel) else zeros(*kernel)


def sums(equation, one, other):
    return tf.einsum(equation, zeros(*one), zeros(*other))


def convolution(x, kernel, stride=1, padding="SAME", **options):
    return tf.nn.conv2d(zeros(*x), weights_of(kernel), stride, padding, **options)


def depthwise(x, kernel):
    return tf.nn.depthwise_conv2d(zeros(*x), weights_of(kernel), [1] * 4, "SAME")


def filter_gradient(layer, x, kernel):
    weights = v1.placeholder(tf.float32, kernel)
    y = layer(x, weights)
    return tf.gradients(y, weights)[0]


BOTH = {"transpose_a": True, "transpose_b": True}
PROFILED = {
    "matmul": lambda: product((8, 16), (16, 4)),
    "matmul, transposed": lambda: product((16, 8), (4, 16), **BOTH),
    "convolution": lambda: convolution((2, 9, 8, 3), (3, 2, 3, 5), 2),
    "convolution, valid": lambda: convolution(
        (2, 9, 8, 3), (3, 3, 3, 5), padding="VALID"
    ),
    "depthwise": lambda: depthwise((2, 8, 8, 3), (3, 3, 3, 2)),
}


def counted(build):
    """Return the op behind the views of what is built."""
    op = build().op
    while op.type in ("Reshape", "Squeeze", "BatchToSpaceND"):
        op = op.inputs[0].op
    return op


def test_as_the_profiler_counts():
    wrong = {}
    for name, build in PROFILED.items():
        with tf.Graph().as_default() as graph:
            found, expected = multiply_adds(counted(build)), profiled(graph)
        if not found == expected > 0:
            wrong[name] = found, expected
    assert wrong == {}


BY_HAND = {
    "batched": (lambda: product((5, 8, 16), (5, 16, 4)), 5 * 8 * 16 * 4),
    "two batches": (lambda: product((2, 5, 8, 16), (2, 5, 16, 4)), 10 * 8 * 16 * 4),
    "a broadcast batch": (lambda: product((5, 8, 16), (1, 16, 4)), 5 * 8 * 16 * 4),
    "einsum": (lambda: sums("bti,io->bto", (2, 7, 8), (8, 3)), 2 * 7 * 8 * 3),
    "attention": (
        lambda: sums("bthc,bshc->bhts", (2, 7, 4, 8), (2, 6, 4, 8)),
        2 * 4 * 7 * 6 * 8,
    ),
    "einsum of a projection": (
        lambda: sums("abc,cde->abde", (2, 7, 8), (8, 3, 5)),
        2 * 7 * 8 * 3 * 5,
    ),
    # Groups of 3 channels: each output channel sees 3 of the 6.
    "grouped": (lambda: convolution((2, 8, 8, 6), (3, 3, 3, 4)), 2 * 8 * 8 * 4 * 9 * 3),
    "dilated": (
        lambda: convolution((1, 8, 8, 2), (3, 3, 2, 4), dilations=2),
        8 * 8 * 4 * 9 * 2,
    ),
    # Each element of the small tensor meets each weight once.
    "transposed": (
        lambda: tf.nn.conv2d_transpose(
            zeros(2, 4, 4, 5), zeros(3, 3, 7, 5), [2, 8, 8, 7], 2
        ),
        2 * 4 * 4 * 5 * 9 * 7,
    ),
    "three dimensions": (
        lambda: tf.nn.conv3d(
            zeros(1, 4, 4, 4, 2), zeros(3, 3, 3, 2, 5), [1] * 5, "SAME"
        ),
        4 * 4 * 4 * 5 * 27 * 2,
    ),
    # Each element of the result and each weight meet as often as forwards.
    "a filter gradient": (
        lambda: filter_gradient(convolution, (2, 8, 8, 3), (3, 3, 3, 5)),
        2 * 8 * 8 * 5 * 9 * 3,
    ),
    "a depthwise filter gradient": (
        lambda: filter_gradient(depthwise, (2, 8, 8, 3), (3, 3, 3, 2)),
        2 * 8 * 8 * 6 * 9,
    ),
    "elementwise": (lambda: zeros(8, 16) + zeros(8, 16), 3 * 128),
    "reduction": (lambda: tf.reduce_sum(zeros(8, 16), 0), 128 + 16 + 1),
    "an unknown batch": (
        lambda: tf.matmul(v1.placeholder(tf.float32, [None, 16]), zeros(16, 4)),
        32 * 16 * 4,
    ),
    "an unknown rank": (lambda: tf.sin(v1.placeholder(tf.float32)), 0),
    "nothing at all": (lambda: product((0, 16), (16, 4)), 0),
}


def test_by_hand(graph):
    found = {n: multiply_adds(counted(build)) for n, (build, _) in BY_HAND.items()}
    assert found == {name: expected for name, (_, expected) in BY_HAND.items()}


SIZES = [
    (tf.float32, [2, 3], 6, 24),
    (tf.float16, [], 1, 2),
    (tf.float64, [5, 0], 0, 0),
    (tf.bool, [7], 7, 7),
    (tf.complex64, [3], 3, 24),
    (tf.bfloat16, [3], 3, 6),
    (tf.int64, [None, 2], 64, 512),
    (tf.float32, None, 0, 0),
    (tf.string, [3], 3, 0),
    (tf.variant, [3], 3, 0),
    (tf.resource, [], 1, 0),
]


def test_sizes(graph):
    for dtype, shape, elements, size in SIZES:
        tensor = v1.placeholder(dtype, shape)
        found = tensor_elements(tensor), tensor_bytes(tensor)
        assert found == (elements, size), (dtype, shape)
    tensor = v1.placeholder(tf.float32, [None, 2, None])
    assert tensor_bytes(tensor, unknown=3) == 4 * 3 * 2 * 3


@given(st.lists(st.integers(0, 1000), max_size=30), st.sampled_from([0.01, 0.1, 0.5]))
def test_negligible_bytes(sizes, share):
    limit = negligible_bytes(sizes, share)
    total = sum(sizes)
    assert limit == 0 or limit in sizes
    assert sum(s for s in sizes if s <= limit) <= share * total
    # No greater limit would do.
    larger = min((s for s in sizes if s > limit), default=math.inf)
    assert math.isinf(larger) or sum(s for s in sizes if s <= larger) > share * total


VIEWS = {
    "reshape": lambda x: tf.reshape(x, [-1]),
    "identity": tf.identity,
    "several": lambda x: tf.raw_ops.IdentityN(input=[x, x])[0],
    "shape": tf.shape,
    "rows": lambda x: tf.raw_ops.Slice(input=x, begin=[16, 0], size=[16, -1]),
    "a sum of one": lambda x: tf.raw_ops.AddN(inputs=[x]),
}


def test_what_shows_a_buffer_takes_no_time_and_what_is_copied_does(graph):
    x = tf.tanh(zeros(64, 16))
    views = {name: op_time(view(x).op) for name, view in VIEWS.items()}
    # Variables are there already.
    v = v1.get_variable("v", [64, 64], use_resource=True)
    read = v.read_value().op
    while read.type == "Identity":
        read = read.inputs[0].op
    # Columns, not rows.
    ops = [x.op, x[:, :8].op, tf.transpose(x).op, tf.concat([x, x], 0).op]
    assert views == dict.fromkeys(VIEWS, 0)
    assert (read.type, op_time(read)) == ("ReadVariableOp", 0)
    assert all(op_time(op) >= 16 * 2 * 64 * 8 for op in ops)


SLOWER = [
    # Of the same elements: a reduction, a transcendental function, next to a sum.
    (tf.tanh, tf.nn.relu),
    (lambda x: tf.reduce_sum(x, 0), lambda x: tf.slice(x, [0, 0], [64, 1])),
    (lambda x: x @ tf.transpose(x), lambda x: x + x),
]


def test_what_computes_takes_longer_than_what_moves(graph):
    x = zeros(64, 64)
    for slow, fast in SLOWER:
        assert op_time(slow(x).op) > op_time(fast(x).op) > 0


def test_a_depthwise_convolution_takes_more_than_its_multiply_adds(graph):
    """Next to a full one of as many; kernels reach a small part of the machine's."""
    narrow = depthwise((2, 32, 32, 64), (3, 3, 64, 1)).op
    full = convolution((2, 32, 32, 64), (1, 1, 64, 9)).op
    assert multiply_adds(narrow) == multiply_adds(full)
    assert op_time(narrow) > 2 * op_time(full)


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
    times = measured_times(ops)
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
        times = measured_times(ops)
    assert len(ops[0].graph.get_operations()) == before
    estimated, measured = (op_times(ops, {}, measured=m) for m in (False, True))
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
    time_of = op_times(ops, {op: called.time for op, called in calls_of(ops).items()})
    with tf.Graph().as_default():
        product = tf.matmul(v1.placeholder(tf.float32, [64, 64]), tf.zeros([64, 64]))
    # And the counters.
    assert 12 * op_time(product.op) < time_of(loop) < 12.1 * op_time(product.op)


def test_unknown_shapes_have_no_times(graph):
    tf.tanh(v1.placeholder(tf.float32, [None, 512]))
    assert not measured_times(graph.get_operations())


def test_a_budget_with_measured_times():
    @tf.function(autograph=False)
    def trace(x):
        loss = chain_loss(x, 8 * [tf.ones([64, 64])])
        report = explain(loss, x, checkpoints=Budget(0.5, measured=True))
        assert report.peak <= 0.5 * report.plain_peak
        assert 0 < report.extra_time < 1
        return loss

    trace.get_concrete_function(tf.TensorSpec([512, 64]))


def test_a_call_of_an_op_on_other_inputs_has_its_attributes():
    with tf.Graph().as_default():
        x = tf.ones([2, 3])
        product = tf.matmul(x, x, transpose_b=True).op
        joined = tf.concat([x, x, x], 1).op
        total = tf.reduce_sum(x, 1, keepdims=True).op
    two = tf.constant([[1.0, 2.0]])
    assert raw_call(product, [two, two])().numpy().tolist() == [[5.0]]
    parts = [two, two, two, tf.constant(0)]
    assert raw_call(joined, parts)().shape == [3, 2]
    assert raw_call(total, [two, tf.constant(1)])().numpy().tolist() == [[3.0]]
    unknown = SimpleNamespace(type="NoSuchOp")
    assert raw_call(unknown, []) is None
