"""What cannot be folded is left as it is, and the report says why."""

import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import EPSILON, Builder, built_together, folded
from tests.select.layer_norms import fused_layer_norm


def conv(b, x=None, channels=4):
    x = b.data(2, 6, 6, 4) if x is None else x
    return tf.nn.conv2d(x, b.weights(3, 3, 4, channels), 1, "SAME")


def image(b, size=6):
    return b.norm(b.data(2, size, size, 4))


def conv_of(b, y, window=1, padding="VALID"):
    return tf.nn.conv2d(y, b.weights(window, window, 4, 4), 1, padding)


def two_readers(b):
    y = image(b)
    return conv_of(b, y) + y


def turned(y):
    return tf.transpose(y, [0, 3, 2, 1])


def read_elsewhere(b):
    y = conv(b)
    return b.norm(y) + tf.nn.relu(y)


def sum_read_elsewhere(b):
    y = conv(b) + conv(b)
    return b.norm(y) + tf.nn.relu(y)


def batches_to_channels(b):
    y = conv(b, b.data(8, 6, 6, 4))
    return b.norm(tf.batch_to_space(y, [1, 1, 2], [[0, 0]] * 3))


def grouped_and_transposed(b):
    y = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[2, 6, 6, 4],
        filter=b.weights(3, 3, 2, 6),
        out_backprop=b.data(2, 6, 6, 6),
        strides=[1] * 4,
        padding="SAME",
    )
    return b.norm(y)


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


ROUND = [[0, 0], [1, 1], [1, 1], [0, 0]]
REFUSED = {
    "pads with zeros (SAME), and the norm shifts": [
        lambda b: conv_of(b, image(b), 3, "SAME")
    ],
    "pads with zeros (EXPLICIT), and the norm shifts": [
        lambda b: conv_of(b, image(b), 3, ROUND)
    ],
    "(Pad) stands between": [lambda b: conv_of(b, tf.pad(image(b), ROUND), 3)],
    "(Relu) stands between": [lambda b: conv_of(b, tf.nn.relu(image(b)))],
    "is transposed": [
        lambda b: tf.nn.conv2d_transpose(
            image(b, 4), b.weights(2, 2, 3, 4), [2, 8, 8, 3], 2
        )
    ],
    "groups of channels": [
        lambda b: tf.nn.conv2d(image(b), b.weights(3, 3, 2, 6), 1, "VALID")
    ],
    "has weights of more axes": [
        lambda b: tf.einsum(
            "abc,cde->abde", b.norm(b.data(2, 5, 3)), b.weights(3, 2, 4)
        ),
        lambda b: tf.matmul(b.norm(b.data(2, 5, 3)), b.weights(2, 3, 4)),
    ],
    "does not hand on each channel": [
        lambda b: tf.matmul(tf.reshape(image(b, 3), [2, 36]), b.weights(36, 5)),
        lambda b: b.norm(tf.reshape(conv(b, b.data(2, 6, 6, 4)), [2, 36 * 2, 2])),
        batches_to_channels,
        lambda b: b.norm(conv(b)[:, :, :, ::-1, ...]),
        lambda b: b.norm(conv(b, channels=6)[:, :, :, 0, ...], 6),
    ],
    "has 2 readers": [two_readers],
    "works along another axis": [
        lambda b: conv_of(b, image(b, 4) * b.weights(4, 1), 1, "SAME")
    ],
    "channels on another axis": [lambda b: conv_of(b, turned(image(b, 4)), 1, "SAME")],
    "no layer comes before the norm": [lambda b: b.norm(b.data(2, 3, 3, 4))],
    "(Placeholder), and the norm would have to be folded into a layer there, too": [
        lambda b: b.norm(conv(b, b.data(1, 1, 1, 4)) + b.data(1, 1, 1, 4, known=(0,))),
    ],
    "(Relu) stands between the norm and any layer before it": [
        lambda b: b.norm(tf.nn.relu(conv(b)))
    ],
    "(MaxPool) stands between the norm and any layer before it": [
        lambda b: b.norm(tf.nn.max_pool2d(conv(b), 2, 2, "SAME"))
    ],
    "joins a tensor with itself": [lambda b: b.norm(tf.add_n([conv(b)] * 2))],
    "joins different numbers of channels": [
        lambda b: b.norm(conv(b) + conv(b, channels=1))
    ],
    "which no layer makes": [
        lambda b: b.norm(tf.concat([conv(b, channels=2), tf.ones([2, 6, 6, 2])], -1))
    ],
    "also reads what lies between the layers and the norm": [sum_read_elsewhere],
    "Conv2D' and the norm; pass clone_shared=True": [read_elsewhere],
    "works along axis -1, and the channels are on axis -3": [
        lambda b: b.norm(turned(conv(b, b.data(2, 4, 4, 4))))
    ],
    "its weights depend on the data": [
        lambda b: b.norm(tf.matmul(b.data(5, 3), b.data(3, 4)))
    ],
    "channels are not the last axis": [
        lambda b: b.norm(tf.matmul(b.weights(5, 3), b.data(3, 4)))
    ],
    "has not as many values as the layer has channels (1)": [
        lambda b: b.norm(conv(b, channels=1), 4)
    ],
    "has not as many values as the layer has channels (2)": [grouped_and_transposed],
    "which depends on the data": [parameters_of_data],
    "is_training=True": [trained, trained_fused],
}


@pytest.mark.parametrize("parameters", ("constants", "resource variables"))
def test_refusals(parameters):
    cases = [(reason, build) for reason, builds in REFUSED.items() for build in builds]
    scopes = {f"case_{i}/": case for i, case in enumerate(cases)}
    builds = {scope: build for scope, (_, build) in scopes.items()}
    graph, _ = built_together(builds, [parameters])
    before = graph.as_graph_def()
    report = fold_batch_norms(graph)
    assert not report.folded, report
    assert len(report.refused) == len(cases)
    found = {entry.norm.split("/")[0] + "/": entry for entry in report.refused}
    wrong = {
        reason: found[scope]
        for scope, (reason, _) in scopes.items()
        if reason not in found[scope].reason
    }
    assert not wrong, wrong
    for entry in report.refused:
        graph.get_operation_by_name(entry.op)
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
    # So does one in training.
    for first in (trained, trained_fused):
        build = lambda b, first=first: b.norm(first(b), 4, "last")  # noqa: E731
        report = folded(build, clone_shared=clone_shared).report
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


@pytest.mark.parametrize("build", (in_conditional, in_loop, with_outer_parameters))
def test_loops_and_conditionals_of_version_1(build, control_flow_v1):
    with tf.Graph().as_default() as graph:
        build(Builder("constants"))
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
