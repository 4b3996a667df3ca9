"""Kinds of layers take in the batch norm behind them."""

import tensorflow as tf

from tests.batchnorm.checking import TURNED, check_together

ATROUS = [2, 2], [[2, 2], [2, 2]]


def conv2d_transpose(b):
    x = b.data(2, 4, 4, 3, known=(0,))
    shape = tf.stack([tf.shape(x)[0], 8, 8, 4])
    return tf.nn.conv2d_transpose(x, b.weights(3, 3, 4, 3), shape, 2)


def dilated_in_batches(b, bias):
    y = tf.space_to_batch(b.data(2, 8, 8, 3), *ATROUS)
    y = tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID")
    y = y + b.weights(4) if bias else y
    return tf.compat.v1.batch_to_space_nd(y, [2, 2], [[0, 0], [0, 0]])


def rows(b):
    return b.data(2, 5, 3, known=(0, 1))


# Those that Keras makes are in `test_norms.py`.
LAYERS = {
    "dilated in batches": lambda b: dilated_in_batches(b, bias=False),
    "dilated in batches, bias": lambda b: dilated_in_batches(b, bias=True),
    "transposed": conv2d_transpose,
    "dense, turned": lambda b: tf.matmul(
        b.data(5, 3, known=(0,)), b.weights(4, 3), transpose_b=True
    ),
    "dense of rank 3": lambda b: tf.nn.bias_add(
        tf.tensordot(rows(b), b.weights(3, 4), [[2], [0]]), b.weights(4)
    ),
    "batched": lambda b: tf.matmul(b.data(2, 5, 3), b.weights(2, 3, 4)),
    "batched, turned": lambda b: tf.linalg.matmul(
        b.data(2, 5, 3), b.weights(1, 4, 3), adjoint_b=True
    ),
    "einsum, weights first": lambda b: tf.einsum(
        "dc,abc->abd", b.weights(4, 3), rows(b)
    ),
    "einsum of heads": lambda b: tf.einsum(
        "abc,cde->abde", b.data(2, 5, 3), b.weights(3, 2, 4)
    ),
}


# Channels on axis 1, of which the processor runs only what Grappler turned.


def first(b, x, *shape):
    return tf.nn.conv2d(x, b.weights(*shape), 1, "VALID", data_format="NCHW")


def norm_first(b, y, fused):
    return b.fused(y, "NCHW") if fused else b.norm_of_first(y)


def before(b, fused):
    y = first(b, norm_first(b, b.data(2, 3, 6, 5), fused), 2, 2, 3, 4)
    return tf.nn.bias_add(y, b.weights(4), "NCHW")


def behind(b, fused):
    return norm_first(b, first(b, b.data(2, 3, 6, 5, known=(0,)), 3, 3, 3, 4), fused)


def behind_a_bias(b, fused):
    y = first(b, b.data(2, 3, 6, 5), 3, 3, 3, 4)
    return norm_first(b, tf.nn.bias_add(y, b.weights(4), "NCHW"), fused)


def behind_depthwise(b, fused):
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=b.data(2, 3, 6, 5),
        filter=b.weights(3, 3, 3, 2),
        strides=[1] * 4,
        padding="SAME",
        data_format="NCHW",
    )
    return norm_first(b, y, fused)


@TURNED
def test_layers_take_in_norms(parameters):
    builds = {name: lambda b, y=y: b.norm(y(b)) for name, y in LAYERS.items()}
    builds |= {
        (build.__name__, fused): lambda b, f=build, fused=fused: f(b, fused)
        for fused in (False, True)
        for build in (before, behind, behind_a_bias, behind_depthwise)
    }
    check_together(builds, parameters=parameters)
