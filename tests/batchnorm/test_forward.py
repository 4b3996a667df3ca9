"""Norms that no layer comes before are folded into the layer behind them."""

import pytest
import tensorflow as tf

from tests.batchnorm.checking import EPSILON, PARAMETERS, check_bare, folded
from tests.thorough import crossed


def conv_of_one(b):
    y = b.norm(b.data(2, 5, 5, 3), 3)
    return tf.nn.conv2d(y, b.weights(1, 1, 3, 4), 1, "SAME") + b.weights(4)


def conv_valid(b):
    y = b.norm(b.data(2, 6, 6, 3, known=(0,)), 3)
    y = tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 2, "VALID", dilations=1)
    return tf.nn.bias_add(y, b.weights(4))


def conv_without_bias(b):
    y = b.norm(b.data(2, 6, 6, 3), 3)
    return tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID", dilations=2)


def conv1d(b):
    y = b.norm(b.data(2, 9, 3, known=(0,)), 3)
    return tf.nn.conv1d(y, b.weights(3, 3, 4), 1, "VALID") + b.weights(4)


def conv3d(b):
    y = b.norm(b.data(2, 4, 4, 4, 3), 3)
    return tf.nn.conv3d(y, b.weights(2, 2, 2, 3, 4), [1] * 5, "VALID") + b.weights(4)


def depthwise(b):
    y = b.norm(b.data(2, 6, 6, 3), 3)
    y = tf.nn.depthwise_conv2d(y, b.weights(3, 3, 3, 2), [1] * 4, "VALID")
    return y + b.weights(6)


def dense(b):
    return tf.matmul(b.norm(b.data(5, 3), 3), b.weights(3, 4)) + b.weights(4)


def dense_turned(b):
    y = tf.matmul(b.norm(b.data(5, 3), 3), b.weights(4, 3), transpose_b=True)
    return y + b.weights(4)


def dense_of_rank_3(b):
    y = tf.tensordot(b.norm(b.data(2, 5, 3), 3), b.weights(3, 4), [[2], [0]])
    return y + b.weights(4)


def einsum(b):
    y = tf.einsum("abc,cd->abd", b.norm(b.data(2, 5, 3), 3), b.weights(3, 4))
    return y + b.weights(4)


def concatenated(b):
    y = tf.concat([b.data(2, 5, 5, 1), b.data(2, 5, 5, 2)], -1)
    return tf.nn.conv2d(b.norm(y, 3), b.weights(1, 1, 3, 4), 1, "VALID") + b.weights(4)


def added(b):
    y = b.norm(b.data(2, 5, 5, 3) + b.data(2, 5, 5, 3), 3)
    return tf.nn.conv2d(y, b.weights(1, 1, 3, 4), 1, "VALID") + b.weights(4)


def by_hand(b):
    x, mean, variance = b.data(2, 5, 5, 3), b.weights(3), b.positive(3)
    y = b.positive(3) * (x - mean) / tf.sqrt(variance + EPSILON) + b.weights(3)
    return tf.nn.conv2d(y, b.weights(2, 2, 3, 4), 1, "VALID") + b.weights(4)


def fused(b):
    y = tf.compat.v1.nn.fused_batch_norm(
        b.data(2, 5, 5, 3),
        b.positive(3),
        b.weights(3),
        b.weights(3),
        b.positive(3),
        is_training=False,
    )[0]
    return tf.nn.conv2d(y, b.weights(2, 2, 3, 4), 1, "VALID") + b.weights(4)


def one_channel(b):
    y = b.norm(b.data(2, 6, 6, 1), 1)
    return tf.nn.conv2d(y, b.weights(3, 3, 1, 4), 2, "VALID") + b.weights(4)


def transposed_of_one(b):
    y = b.norm(b.data(2, 4, 4, 3), 3)
    y = tf.nn.conv2d_transpose(y, b.weights(1, 1, 4, 3), [2, 4, 4, 4], 1)
    return y + b.weights(4)


def scaled(b):
    y = tf.identity(b.norm(b.data(2, 5, 5, 3), 3) * 2.0 - b.weights(3))
    return tf.nn.conv2d(y, b.weights(2, 2, 3, 4), 1, "VALID") + b.weights(4)


LAYERS = {
    build.__name__: build
    for build in (
        conv_of_one,
        conv_valid,
        conv_without_bias,
        conv1d,
        conv3d,
        depthwise,
        dense,
        dense_turned,
        dense_of_rank_3,
        einsum,
        concatenated,
        added,
        by_hand,
        fused,
        one_channel,
        transposed_of_one,
        scaled,
    )
}


@pytest.mark.parametrize(
    ("layer", "parameters"), crossed(LAYERS, PARAMETERS, together=1)
)
def test_layers_take_in_the_norm_before_them(layer, parameters):
    outcome = folded(LAYERS[layer], parameters)
    check_bare(outcome, additions_left=2 if layer == "added" else 1)
    assert all(entry.forward for entry in outcome.report.folded)


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_norms_before_and_behind_a_layer(parameters):
    def build(b):
        y = b.norm(b.data(2, 6, 6, 3), 3, "before")
        y = tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID") + b.weights(4)
        return b.norm(y, 4, "behind")

    outcome = folded(build, parameters)
    check_bare(outcome, norms=2)
    assert {e.norm.split("/")[0]: e.forward for e in outcome.report.folded} == {
        "before": True,
        "behind": False,
    }


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_norms_before_each_other(parameters):
    def build(b):
        y = b.norm(b.data(2, 6, 6, 3), 3, "first")
        y = b.norm(tf.identity(y), 3, "second")
        y = b.norm(y, 3, "third")
        return tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID") + b.weights(4)

    check_bare(folded(build, parameters), norms=3)


def shiftless(b, x):
    zero = tf.zeros([3])
    return tf.nn.batch_normalization(x, zero, b.positive(3), zero, b.positive(3), 1e-3)


def padded(b):
    y = shiftless(b, b.data(2, 6, 6, 3))
    return tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 2, "SAME") + b.weights(4)


def padded_explicitly(b):
    y = shiftless(b, b.data(2, 6, 6, 3))
    padding = [[0, 0], [1, 1], [2, 0], [0, 0]]
    return tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 2, padding) + b.weights(4)


def transposed(b):
    y = shiftless(b, b.data(2, 4, 4, 3))
    y = tf.nn.conv2d_transpose(y, b.weights(3, 3, 4, 3), [2, 8, 8, 4], 2)
    return y + b.weights(4)


def heads(b):
    y = shiftless(b, b.data(2, 5, 3))
    return tf.einsum("abc,cde->abde", y, b.weights(3, 2, 4))


def batched(b):
    return tf.matmul(shiftless(b, b.data(2, 5, 3)), b.weights(2, 3, 4)) + b.weights(4)


@pytest.mark.parametrize(
    "build", (padded, padded_explicitly, transposed, heads, batched)
)
def test_a_norm_that_does_not_shift_goes_where_others_cannot(build):
    check_bare(folded(build), additions_left=build is not heads)
