"""Multiply-adds and sizes, against TensorFlow's profiler and numbers by hand."""

import math

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.gradients.tensor_sizes import negligible_bytes
from geutil.memory.op_costs import multiply_adds, op_time
from geutil.memory.sizes import tensor_bytes, tensor_elements

v1 = tf.compat.v1


def zeros(*shape):
    return tf.constant(0.0, shape=shape)


def profiled(graph):
    """Return half the floating-point operations that TensorFlow's profiler counts."""
    options = v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    found = v1.profiler.profile(graph, cmd="op", options=options)
    return found.total_float_ops // 2


PROFILED = {
    "matmul": lambda: tf.matmul(zeros(8, 16), zeros(16, 4)),
    "matmul, transposed": lambda: tf.matmul(
        zeros(16, 8), zeros(4, 16), transpose_a=True, transpose_b=True
    ),
    "convolution": lambda: tf.nn.conv2d(
        zeros(2, 9, 8, 3), zeros(3, 2, 3, 5), 2, "SAME"
    ),
    "convolution, valid": lambda: tf.nn.conv2d(
        zeros(2, 9, 8, 3), zeros(3, 3, 3, 5), 1, "VALID"
    ),
    "depthwise": lambda: tf.nn.depthwise_conv2d(
        zeros(2, 8, 8, 3), zeros(3, 3, 3, 2), [1] * 4, "SAME"
    ),
}


@pytest.mark.parametrize("name", PROFILED)
def test_as_the_profiler_counts(name):
    with tf.Graph().as_default() as graph:
        op = PROFILED[name]().op
        while op.type in ("Reshape", "Squeeze"):
            op = op.inputs[0].op
        assert multiply_adds(op) == profiled(graph) > 0


BY_HAND = {
    "batched": (lambda: tf.matmul(zeros(5, 8, 16), zeros(5, 16, 4)), 5 * 8 * 16 * 4),
    "two batches": (
        lambda: tf.matmul(zeros(2, 5, 8, 16), zeros(2, 5, 16, 4)),
        10 * 8 * 16 * 4,
    ),
    "a broadcast batch": (
        lambda: tf.matmul(zeros(5, 8, 16), zeros(1, 16, 4)),
        5 * 8 * 16 * 4,
    ),
    "einsum": (
        lambda: tf.einsum("bti,io->bto", zeros(2, 7, 8), zeros(8, 3)),
        2 * 7 * 8 * 3,
    ),
    "attention": (
        lambda: tf.einsum("bthc,bshc->bhts", zeros(2, 7, 4, 8), zeros(2, 6, 4, 8)),
        2 * 4 * 7 * 6 * 8,
    ),
    "einsum of a projection": (
        lambda: tf.einsum("abc,cde->abde", zeros(2, 7, 8), zeros(8, 3, 5)),
        2 * 7 * 8 * 3 * 5,
    ),
    # Groups of 3 channels: each output channel sees 3 of the 6.
    "grouped": (
        lambda: tf.nn.conv2d(zeros(2, 8, 8, 6), zeros(3, 3, 3, 4), 1, "SAME"),
        2 * 8 * 8 * 4 * 9 * 3,
    ),
    "dilated": (
        lambda: tf.nn.conv2d(
            zeros(1, 8, 8, 2), zeros(3, 3, 2, 4), 1, "SAME", dilations=2
        ),
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
    "elementwise": (lambda: zeros(8, 16) + zeros(8, 16), 3 * 128),
    "reduction": (lambda: tf.reduce_sum(zeros(8, 16), 0), 128 + 16 + 1),
    "an unknown batch": (
        lambda: tf.matmul(v1.placeholder(tf.float32, [None, 16]), zeros(16, 4)),
        32 * 16 * 4,
    ),
    "an unknown rank": (lambda: tf.sin(v1.placeholder(tf.float32)), 0),
    "nothing at all": (lambda: tf.matmul(zeros(0, 16), zeros(16, 4)), 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    build, expected = BY_HAND[name]
    with tf.Graph().as_default():
        op = build().op
        while op.type in ("Reshape", "Squeeze", "BatchToSpaceND"):
            op = op.inputs[0].op
        assert multiply_adds(op) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "elements", "size"),
    [
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
    ],
)
def test_sizes(dtype, shape, elements, size):
    with tf.Graph().as_default():
        tensor = v1.placeholder(dtype, shape)
        assert tensor_elements(tensor) == elements
        assert tensor_bytes(tensor) == size


def test_what_an_unknown_dimension_counts_as():
    with tf.Graph().as_default():
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


@pytest.mark.parametrize("name", VIEWS)
def test_what_shows_a_buffer_takes_no_time(name):
    with tf.Graph().as_default():
        op = VIEWS[name](tf.tanh(zeros(64, 16))).op
    assert op_time(op) == 0


def test_what_is_copied_takes_time():
    with tf.Graph().as_default():
        x = tf.tanh(zeros(64, 16))
        # Columns, not rows.
        ops = [x.op, x[:, :8].op, tf.transpose(x).op, tf.concat([x, x], 0).op]
    assert all(op_time(op) >= 16 * 2 * 64 * 8 for op in ops)


def test_variables_are_there_already():
    with tf.Graph().as_default():
        v = v1.get_variable("v", [64, 64], use_resource=True)
        read = v.read_value().op
    while read.type == "Identity":
        read = read.inputs[0].op
    assert (read.type, op_time(read)) == ("ReadVariableOp", 0)


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        # Of the same elements: a reduction, a transcendental function, next to a sum.
        (tf.tanh, tf.nn.relu),
        (lambda x: tf.reduce_sum(x, 0), lambda x: tf.slice(x, [0, 0], [64, 1])),
        (lambda x: x @ tf.transpose(x), lambda x: x + x),
    ],
)
def test_what_computes_takes_longer_than_what_moves(slow, fast):
    with tf.Graph().as_default():
        x = zeros(64, 64)
        assert op_time(slow(x).op) > op_time(fast(x).op) > 0


def test_a_depthwise_convolution_takes_more_than_its_multiply_adds():
    """Next to a full one of as many; kernels reach a small part of the machine's."""
    with tf.Graph().as_default():
        x = zeros(2, 32, 32, 64)
        depthwise = tf.nn.depthwise_conv2d(x, zeros(3, 3, 64, 1), [1] * 4, "SAME").op
        full = tf.nn.conv2d(x, zeros(1, 1, 64, 9), 1, "SAME").op
    assert multiply_adds(depthwise) == multiply_adds(full)
    assert op_time(depthwise) > 2 * op_time(full)
