"""What cannot be folded is left as it is, and the report says why."""

import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError, FoldError
from tests.batchnorm.checking import EPSILON, Builder, built, folded
from tests.select.layer_norms import fused_layer_norm


def conv(b, x=None, channels=4):
    x = b.data(2, 6, 6, 4) if x is None else x
    return tf.nn.conv2d(x, b.weights(3, 3, 4, channels), 1, "SAME")


def padded_forward(b):
    return conv(b, b.norm(b.data(2, 6, 6, 4), 4))


def explicitly_padded_forward(b):
    y = b.norm(b.data(2, 6, 6, 4), 4)
    padding = [[0, 0], [1, 1], [1, 1], [0, 0]]
    return tf.nn.conv2d(y, b.weights(3, 3, 4, 4), 1, padding)


def pad_op(b):
    y = tf.pad(b.norm(b.data(2, 6, 6, 4), 4), [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.nn.conv2d(y, b.weights(3, 3, 4, 4), 1, "VALID")


def transposed_forward(b):
    y = b.norm(b.data(2, 4, 4, 3), 3)
    return tf.nn.conv2d_transpose(y, b.weights(2, 2, 4, 3), [2, 8, 8, 4], 2)


def grouped_forward(b):
    y = b.norm(b.data(2, 6, 6, 4), 4)
    return tf.nn.conv2d(y, b.weights(3, 3, 2, 6), 1, "VALID")


def heads_forward(b):
    y = b.norm(b.data(2, 5, 3), 3)
    return tf.einsum("abc,cde->abde", y, b.weights(3, 2, 4))


def batched_forward(b):
    return tf.matmul(b.norm(b.data(2, 5, 3), 3), b.weights(2, 3, 4))


def relu_forward(b):
    y = tf.nn.relu(b.norm(b.data(2, 6, 6, 4), 4))
    return tf.nn.conv2d(y, b.weights(1, 1, 4, 4), 1, "VALID")


def flattened(b):
    y = tf.reshape(b.norm(b.data(2, 3, 3, 4), 4), [2, 36])
    return tf.matmul(y, b.weights(36, 5))


def two_readers(b):
    y = b.norm(b.data(2, 6, 6, 4), 4)
    return tf.nn.conv2d(y, b.weights(1, 1, 4, 4), 1, "VALID") + y


def scaled_along_another_axis(b):
    y = b.norm(b.data(2, 4, 4, 4), 4) * b.weights(4, 1)
    return tf.nn.conv2d(y, b.weights(1, 1, 4, 4), 1, "SAME")


def other_axis_forward(b):
    y = b.norm(b.data(2, 4, 4, 4), 4)
    return tf.nn.conv2d(tf.transpose(y, [0, 3, 2, 1]), b.weights(1, 1, 4, 4), 1, "SAME")


def residual_of_batch_1(b):
    return b.norm(conv(b, b.data(1, 1, 1, 4)) + b.data(1, 1, 1, 4, known=(0,)), 4)


def read_elsewhere(b):
    y = conv(b)
    return b.norm(y, 4) + tf.nn.relu(y)


def relu_between(b):
    return b.norm(tf.nn.relu(conv(b)), 4)


def other_axis(b):
    return b.norm(tf.transpose(conv(b, b.data(2, 4, 4, 4)), [0, 3, 2, 1]), 4)


def batches_to_channels(b):
    y = conv(b, b.data(8, 6, 6, 4))
    return b.norm(tf.batch_to_space(y, [1, 1, 2], [[0, 0]] * 3), 8)


def lost_channels(b):
    return b.norm(tf.reshape(conv(b, b.data(2, 6, 6, 4)), [2, 36 * 2, 2]), 2)


def weights_of_data(b):
    return b.norm(tf.matmul(b.data(5, 3), b.data(3, 4)), 4)


def weights_on_the_left(b):
    return b.norm(tf.matmul(b.weights(5, 3), b.data(3, 4)), 4)


def broadcast_to_more_channels(b):
    return b.norm(conv(b, channels=1), 4)


def grouped_and_transposed(b):
    y = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[2, 6, 6, 4],
        filter=b.weights(3, 3, 2, 6),
        out_backprop=b.data(2, 6, 6, 6),
        strides=[1] * 4,
        padding="SAME",
    )
    return b.norm(y, 4)


def parameters_of_data(b):
    y = conv(b)
    mean, variance = tf.nn.moments(b.data(2, 6, 6, 4), [0, 1, 2])
    return tf.compat.v1.nn.fused_batch_norm(
        y, b.positive(4), b.weights(4), mean, variance, is_training=False
    )[0]


def trained(b):
    mean, variance = tf.nn.moments(y := conv(b), [0, 1, 2])
    return tf.nn.batch_normalization(
        y, mean, variance, b.weights(4), b.positive(4), EPSILON, name="trained"
    )


def trained_fused(b):
    return tf.compat.v1.nn.fused_batch_norm(
        conv(b), b.positive(4), b.weights(4), is_training=True
    )[0]


REFUSED = {
    padded_forward: "pads with zeros (SAME), and the norm shifts",
    explicitly_padded_forward: "pads with zeros (EXPLICIT), and the norm shifts",
    pad_op: "(Pad) stands between",
    transposed_forward: "is transposed",
    grouped_forward: "groups of channels",
    heads_forward: "has weights of more axes",
    batched_forward: "has weights of more axes",
    relu_forward: "(Relu) stands between",
    flattened: "does not hand on each channel",
    two_readers: "has 2 readers",
    scaled_along_another_axis: "works along another axis",
    other_axis_forward: "channels on another axis",
    residual_of_batch_1: "no layer",
    read_elsewhere: "also reads what lies between 'Conv2D' and the norm",
    relu_between: "no layer",
    other_axis: "works along axis -1, and the channels are on axis -3",
    batches_to_channels: "does not hand on each channel",
    lost_channels: "does not hand on each channel",
    weights_of_data: "its weights depend on the data",
    weights_on_the_left: "channels are not the last axis",
    broadcast_to_more_channels: "has not as many values as the layer has channels (1)",
    grouped_and_transposed: "has not as many values as the layer has channels (2)",
    parameters_of_data: "which depends on the data",
    trained: "is_training=True",
    trained_fused: "is_training=True",
}


@pytest.mark.parametrize("parameters", ("constants", "resource variables"))
@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_refusals(build, parameters):
    graph, _ = built(build, parameters)
    before = graph.as_graph_def()
    report = fold_batch_norms(graph)
    assert not report.folded, report
    (refused,) = report.refused
    assert REFUSED[build] in refused.reason, refused
    graph.get_operation_by_name(refused.op)
    assert graph.as_graph_def() == before


@pytest.mark.parametrize("clone_shared", (False, True))
def test_two_shifts_of_one_scale(clone_shared):
    def build(b):
        y, mean, root = conv(b), b.weights(4), tf.math.rsqrt(b.positive(4) + EPSILON)
        scaled = y * root
        return tf.nn.relu(scaled - mean * root) + tf.nn.relu(scaled + mean * root)

    report = folded(build, clone_shared=clone_shared).report
    assert len(report.folded) == (2 if clone_shared else 0)
    assert len(report.refused) == (0 if clone_shared else 2)


@pytest.mark.parametrize("clone_shared", (False, True))
def test_a_norm_that_may_not_be_folded_bars_the_way_of_the_next(clone_shared):
    def build(b):
        y = b.norm(conv(b), 4, "outer/first")
        return b.norm(y, 4, "inner/second")

    report = folded(build, scope="inner", clone_shared=clone_shared).report
    assert not report.folded
    second = next(e for e in report.refused if e.norm.startswith("inner"))
    assert "is part of 'outer/first" in second.reason


@pytest.mark.parametrize("build", (trained, trained_fused))
def test_a_training_norm_bars_the_way_of_the_next(build):
    report = folded(lambda b: b.norm(build(b), 4, "last"), clone_shared=True).report
    assert not report.folded
    assert len(report.refused) == 2


def test_scope():
    def build(b):
        y = tf.nn.relu(b.norm(conv(b), 4, "one/norm"))
        y = tf.nn.relu(b.norm(conv(b, y), 4, "two/norm"))
        return b.norm(conv(b, y), 4, "two_more/norm")

    report = folded(build, scope="two").report
    assert [e.norm for e in report.folded] == ["two/norm"]
    assert [e.norm for e in report.refused] == ["one/norm", "two_more/norm"]
    assert all("outside of scope 'two'" in e.reason for e in report.refused)


def test_strict_changes_nothing():
    def build(b):
        y = tf.nn.relu(b.norm(conv(b), 4, "one"))
        return b.norm(tf.nn.relu(conv(b, y)), 4, "two")

    graph, _ = built(build)
    edges = {op: [t.name for t in op.inputs] for op in graph.get_operations()}
    with pytest.raises(FoldError, match="two"):
        fold_batch_norms(graph, strict=True)
    assert all([t.name for t in op.inputs] == edges[op] for op in edges)
    # What was made in vain reads nothing any more.
    assert [e.norm for e in fold_batch_norms(graph).folded] == ["one"]


@pytest.mark.parametrize("argument", (None, 3, "graph"))
def test_the_first_argument_has_to_hold_a_graph(argument):
    with pytest.raises(ArgumentTypeError):
        fold_batch_norms(argument)


def in_conditional(b):
    def taken():
        return b.norm(conv(b, x), 4)

    x = b.data(2, 6, 6, 4)
    return tf.compat.v1.cond(tf.reduce_sum(x) > -1e9, taken, lambda: x)


def in_loop(b):
    def body(i, y):
        return i + 1, b.norm(conv(b, y), 4)

    x = b.data(2, 6, 6, 4, known=(0, 1, 2))
    return tf.compat.v1.while_loop(lambda i, y: i < 2, body, [0, x])[1]


def with_outer_parameters(b):
    x = b.data(2, 6, 6, 4)
    parameters = b.weights(4), b.positive(4), b.weights(4), b.positive(4), EPSILON

    def taken():
        return tf.nn.batch_normalization(conv(b, x), *parameters)

    return tf.compat.v1.cond(tf.reduce_sum(x) > -1e9, taken, lambda: x)


@pytest.mark.parametrize("parameters", ("constants", "resource variables"))
@pytest.mark.parametrize("build", (in_conditional, in_loop, with_outer_parameters))
def test_loops_and_conditionals_of_version_1(build, parameters):
    control_flow = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            build(Builder("constants"))
    finally:
        if control_flow:
            tf.compat.v1.enable_control_flow_v2()
    report = fold_batch_norms(graph)
    assert not report.folded
    (refused,) = report.refused
    assert "version 1" in refused.reason


def test_a_layer_norm_of_one_op_is_no_batch_norm():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 5, 8])
        tf.identity(fused_layer_norm(x)[0])
    for is_training in (False, True):
        report = fold_batch_norms(graph, is_training=is_training)
        assert not report.folded
        assert not report.refused
