"""Channels on axis 1: the processor runs such graphs once Grappler turned them."""

import pytest
import tensorflow as tf

from tests.batchnorm.checking import PARAMETERS, check_bare, folded
from tests.thorough import crossed


def conv(b, x, *shape):
    return tf.nn.conv2d(x, b.weights(*shape), 1, "VALID", data_format="NCHW")


def parameters(b, count, fused):
    values = b.positive(count), b.weights(count), b.weights(count), b.positive(count)
    return values if fused else [tf.reshape(t, [count, 1, 1]) for t in values]


def norm(b, y, fused):
    scale, offset, mean, variance = parameters(b, y.shape[1], fused)
    if not fused:
        return tf.nn.batch_normalization(y, mean, variance, offset, scale, 1e-3)
    return tf.compat.v1.nn.fused_batch_norm(
        y, scale, offset, mean, variance, 1e-3, data_format="NCHW", is_training=False
    )[0]


def behind(b, fused):
    return norm(b, conv(b, b.data(2, 3, 6, 5, known=(0,)), 3, 3, 3, 4), fused)


def behind_a_bias(b, fused):
    y = conv(b, b.data(2, 3, 6, 5), 3, 3, 3, 4)
    return norm(b, tf.nn.bias_add(y, b.weights(4), "NCHW"), fused)


def before(b, fused):
    y = conv(b, norm(b, b.data(2, 3, 6, 5), fused), 2, 2, 3, 4)
    return tf.nn.bias_add(y, b.weights(4), "NCHW")


def depthwise(b, fused):
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=b.data(2, 3, 6, 5),
        filter=b.weights(3, 3, 3, 2),
        strides=[1] * 4,
        padding="SAME",
        data_format="NCHW",
    )
    return norm(b, y, fused)


@pytest.mark.parametrize(
    ("build", "fused", "kind"),
    crossed((behind, behind_a_bias, before, depthwise), (False, True), PARAMETERS),
)
def test_channels_first(build, fused, kind):
    check_bare(folded(lambda b: build(b, fused), kind))
