"""Each kind of layer takes in the batch norm behind it."""

import pytest
import tensorflow as tf

from tests.batchnorm.checking import PARAMETERS, check_bare, folded
from tests.thorough import crossed


def conv1d(b):
    y = tf.nn.conv1d(b.data(2, 9, 3, known=(0,)), b.weights(3, 3, 4), 2, "SAME")
    return b.norm(y, 4)


def conv2d(b):
    x = b.data(2, 7, 6, 3, known=(0, 1, 2))
    return b.norm(tf.nn.conv2d(x, b.weights(3, 3, 3, 4), 2, "SAME"), 4)


def conv3d(b):
    x = b.data(2, 5, 5, 4, 2, known=(0, 1, 2, 3))
    return b.norm(tf.nn.conv3d(x, b.weights(2, 2, 2, 2, 4), [1] * 5, "VALID"), 4)


def depthwise(b):
    x = b.data(2, 7, 6, 3, known=(0, 1, 2))
    y = tf.nn.depthwise_conv2d(x, b.weights(3, 3, 3, 2), [1] * 4, "SAME")
    return b.norm(y, 6)


def separable(b):
    y = tf.nn.separable_conv2d(
        b.data(2, 7, 6, 3),
        b.weights(3, 3, 3, 2),
        b.weights(1, 1, 6, 4),
        [1] * 4,
        "SAME",
    )
    return b.norm(y, 4)


def dilated(b):
    x = b.data(2, 9, 9, 3, known=(0, 1, 2))
    y = tf.nn.conv2d(x, b.weights(3, 3, 3, 4), 1, "SAME", dilations=2)
    return b.norm(y, 4)


def dilated_in_batches(b):
    y = tf.space_to_batch(b.data(2, 8, 8, 3), [2, 2], [[2, 2], [2, 2]])
    y = tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID")
    return b.norm(tf.compat.v1.batch_to_space_nd(y, [2, 2], [[0, 0], [0, 0]]), 4)


def dilated_in_batches_with_bias(b):
    y = tf.space_to_batch(b.data(2, 8, 8, 3), [2, 2], [[2, 2], [2, 2]])
    y = tf.nn.conv2d(y, b.weights(3, 3, 3, 4), 1, "VALID") + b.weights(4)
    return b.norm(tf.compat.v1.batch_to_space_nd(y, [2, 2], [[0, 0], [0, 0]]), 4)


def grouped(b):
    y = tf.nn.conv2d(b.data(2, 6, 6, 4), b.weights(3, 3, 2, 6), 1, "SAME")
    return b.norm(y, 6)


def transposed(b):
    x = b.data(2, 4, 4, 3, known=(0,))
    shape = tf.stack([tf.shape(x)[0], 8, 8, 4])
    return b.norm(tf.nn.conv2d_transpose(x, b.weights(3, 3, 4, 3), shape, 2), 4)


def transposed_3d(b):
    y = tf.nn.conv3d_transpose(
        b.data(2, 3, 3, 3, 2), b.weights(2, 2, 2, 4, 2), [2, 6, 6, 6, 4], 2
    )
    return b.norm(y, 4)


def dense(b):
    return b.norm(tf.matmul(b.data(5, 3, known=(0,)), b.weights(3, 4)), 4)


def dense_turned(b):
    x = b.data(5, 3, known=(0,))
    return b.norm(tf.matmul(x, b.weights(4, 3), transpose_b=True), 4)


def dense_of_rank_3(b):
    y = tf.tensordot(b.data(2, 5, 3, known=(0, 1)), b.weights(3, 4), [[2], [0]])
    return b.norm(tf.nn.bias_add(y, b.weights(4)), 4)


def batched(b):
    return b.norm(tf.matmul(b.data(2, 5, 3), b.weights(2, 3, 4)), 4)


def batched_turned(b):
    y = tf.linalg.matmul(b.data(2, 5, 3), b.weights(1, 4, 3), adjoint_b=True)
    return b.norm(y, 4)


def einsum(b):
    x = b.data(2, 5, 3, known=(0, 1))
    return b.norm(tf.einsum("abc,cd->abd", x, b.weights(3, 4)), 4)


def einsum_with_weights_first(b):
    x = b.data(2, 5, 3, known=(0, 1))
    return b.norm(tf.einsum("dc,abc->abd", b.weights(4, 3), x), 4)


def einsum_of_heads(b):
    y = tf.einsum("abc,cde->abde", b.data(2, 5, 3), b.weights(3, 2, 4))
    return b.norm(y, 4)


LAYERS = {
    build.__name__: build
    for build in (
        conv1d,
        conv2d,
        conv3d,
        depthwise,
        separable,
        dilated,
        dilated_in_batches,
        dilated_in_batches_with_bias,
        grouped,
        transposed,
        transposed_3d,
        dense,
        dense_turned,
        dense_of_rank_3,
        batched,
        batched_turned,
        einsum,
        einsum_with_weights_first,
        einsum_of_heads,
    )
}


@pytest.mark.parametrize(
    ("layer", "parameters"), crossed(LAYERS, PARAMETERS, together=1)
)
def test_layers_take_in_the_norm_behind_them(layer, parameters):
    check_bare(folded(LAYERS[layer], parameters))
