"""A layer norm as tf_keras writes it: a batch norm in training of reshaped data."""

import tensorflow as tf

R = tf.raw_ops


def fused_layer_norm(x, epsilon=1e-3, **changes):
    """Return x, normalized over its last axis.

    `changes` takes parts of it another way, so that it is something else.
    """
    shape = tf.shape(x)
    rows = tf.reduce_prod(shape[:-1])
    data = tf.reshape(x, tf.stack([1, rows, tf.reduce_prod(shape[-1:]), 1]))
    given = {
        "scale": tf.ones([rows]),
        "offset": tf.zeros([rows]),
        "data_format": "NCHW",
        "is_training": True,
        **changes,
    }
    made = R.FusedBatchNormV3(x=data, mean=[], variance=[], epsilon=epsilon, **given)
    return tf.reshape(made.y, shape), made
