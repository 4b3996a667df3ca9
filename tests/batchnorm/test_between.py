"""What may stand between a layer and its batch norm, and what may come behind."""

import pytest
import tensorflow as tf

from tests.batchnorm.checking import (
    PARAMETERS,
    TURNED,
    check_bare,
    check_together,
    folded,
    needed,
)


def conv(b, channels=4):
    x = b.data(2, 6, 6, 3, known=(0,))
    return tf.nn.conv2d(x, b.weights(3, 3, 3, channels), 1, "SAME")


def reshaped_for_dense(b):
    x = tf.reshape(b.data(2, 5, 3), [-1, 3])
    y = tf.reshape(tf.matmul(x, b.weights(3, 4)) + b.weights(4), [2, 5, 4])
    return b.norm(y)


def expanded(b):
    y = tf.expand_dims(tf.matmul(b.data(5, 3), b.weights(3, 4)), 1)
    return b.norm(tf.squeeze(y, [1]))


BETWEEN = {
    "nothing": lambda b: b.norm(conv(b)),
    "bias": lambda b: b.norm(tf.nn.bias_add(conv(b), b.weights(4))),
    "addition": lambda b: b.norm(conv(b) + b.weights(4)),
    "addition of rank 4": lambda b: b.norm(b.weights(1, 1, 1, 4) + conv(b)),
    "addition of a scalar": lambda b: b.norm(conv(b) + b.weights()),
    "old addition": lambda b: b.norm(tf.raw_ops.Add(x=conv(b), y=b.weights(4))),
    "subtraction": lambda b: b.norm(conv(b) - b.weights(4)),
    "scale": lambda b: b.norm(conv(b) * 0.5),
    "identities": lambda b: b.norm(tf.identity(tf.stop_gradient(conv(b)))),
    "reshape": lambda b: b.norm(tf.reshape(conv(b), [-1, 4])),
    "reshape and bias": reshaped_for_dense,
    "transpose": lambda b: b.norm_of_first(tf.transpose(conv(b), [0, 3, 1, 2])),
    "expand and squeeze": expanded,
    "one channel": lambda b: b.norm(conv(b, 1) + b.weights(1)),
    "a norm": lambda b: b.norm(tf.identity(b.norm(conv(b), 4, "first")), 4, "second"),
    # All sizes but that of the channels are unknown.
    "unknown sizes": lambda b: b.norm(
        tf.nn.conv2d(
            b.data(2, 6, 5, 3, known=(0, 1, 2)), b.weights(3, 3, 3, 4), 1, "SAME"
        )
    ),
}


@TURNED
def test_between(parameters):
    def check(name, outcome):
        check_bare(outcome, norms=2 if name == "a norm" else 1)

    check_together(BETWEEN, check, parameters)


def test_shared_weights_are_folded_for_each_layer():
    def build(b):
        weights = b.weights(1, 1, 3, 3)
        x = b.data(2, 4, 4, 3)
        y = tf.nn.relu(b.norm(tf.nn.conv2d(x, weights, 1, "SAME"), 3, "first"))
        y = b.norm(tf.nn.conv2d(y, weights, 1, "SAME"), 3, "second")
        return y + tf.nn.conv2d(y, weights, 1, "SAME")

    outcome = folded(build, "resource variables")
    assert len(outcome.report.folded) == 2
    assert outcome.types["Conv2D"] == 3


def test_a_layer_that_is_read_elsewhere_is_computed_twice_on_request():
    def build(b):
        y = conv(b)
        return b.norm(y, 4, "first") + b.norm(tf.nn.bias_add(y, b.weights(4)), 4) + y

    def check(name, outcome):
        assert len(outcome.report.folded) == 2
        assert outcome.types["Conv2D"] == 3, outcome.types
        assert not outcome.types["Mul"], outcome.types

    check_together(dict.fromkeys(PARAMETERS, build), check, clone_shared=True)


def test_norms_of_norms_that_are_read_elsewhere():
    def build(b):
        first = b.norm(conv(b), 4, "first")
        return b.norm(first, 4, "second") + b.norm(first, 4, "third")

    outcome = folded(build, clone_shared=True)
    assert len(outcome.report.folded) + len(outcome.report.refused) == 3
    assert not outcome.types["Mul"], outcome.report


def reshaped_by_its_own_shape(b):
    y = tf.nn.conv2d(b.data(2, 6, 6, 3, known=()), b.weights(3, 3, 3, 4), 1, "SAME")
    shape = tf.shape(y)
    y = tf.reshape(y, tf.stack([shape[0] * shape[1], shape[2], 4]))
    return b.norm(y, 4)


def normalized_before_a_dense_layer(b):
    x = b.data(2, 5, 3, known=(0, 1))
    return tf.tensordot(b.norm(x, 3), b.weights(3, 4), [[2], [0]]) + b.weights(4)


@pytest.mark.parametrize(
    "build", (reshaped_by_its_own_shape, normalized_before_a_dense_layer)
)
def test_nothing_is_computed_for_its_shape_alone(build):
    outcome = folded(build)
    check_bare(outcome)
    out = outcome.graph.get_operation_by_name("out")
    types = [op.type for op in needed(out, controls=True)]
    assert types.count("Conv2D") + types.count("MatMul") == 1
    assert types.count("Mul") == (build is reshaped_by_its_own_shape)


@pytest.mark.parametrize("forward", (False, True))
def test_what_the_norm_waited_for_still_comes_before(forward):
    def build(b):
        x = b.data(2, 6, 6, 3, known=(0,))
        x = x if forward else tf.nn.conv2d(x, b.weights(1, 1, 3, 3), 1, "SAME")
        with tf.control_dependencies([tf.no_op("awaited")]):
            x = b.norm(x, 3)
        return tf.nn.conv2d(x, b.weights(1, 1, 3, 3), 1, "SAME") if forward else x

    outcome = folded(build)
    check_bare(outcome)
    out = outcome.graph.get_operation_by_name("out")
    assert "awaited" in [op.name for op in needed(out, controls=True)]
