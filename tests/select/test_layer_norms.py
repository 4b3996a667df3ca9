import pytest
import tensorflow as tf

from geutil.select.networks.batch_norms import is_layer_norm
from tests.select.layer_norms import fused_layer_norm


def norm(**changes):
    x = tf.compat.v1.placeholder(tf.float32, [None, 5, 8])
    _, made = fused_layer_norm(x, **changes)
    return made


def test_the_layer_norm_of_tf_keras():
    with tf.Graph().as_default():
        assert is_layer_norm(norm().y.op)


def test_it_stays_one_at_a_fixed_batch():
    with tf.Graph().as_default():
        _, made = fused_layer_norm(tf.compat.v1.placeholder(tf.float32, [1, 5, 8]))
        assert is_layer_norm(made.y.op)


def test_another_op():
    with tf.Graph().as_default():
        assert not is_layer_norm(tf.ones([2]).op)


OTHERS = {
    "parameters": lambda: norm(scale=tf.Variable(tf.ones([5]))),
    "ones of a fixed number": lambda: norm(scale=tf.ones([5])),
    "channels last": lambda: norm(data_format="NHWC"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_batch_norms_are_none(make):
    with tf.Graph().as_default():
        assert not is_layer_norm(make().y.op)


def test_a_norm_whose_statistics_are_read_is_none():
    with tf.Graph().as_default():
        made = norm()
        tf.identity(made.batch_mean)
        assert not is_layer_norm(made.y.op)


def test_a_norm_that_is_no_reshaped_one_is_none():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 5, 5])
        channels = tf.shape(x)[1:2]
        made = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=tf.fill(channels, 1.0),
            offset=tf.fill(channels, 0.0),
            mean=[],
            variance=[],
            data_format="NCHW",
            is_training=True,
        )
        assert not is_layer_norm(made.y.op)
