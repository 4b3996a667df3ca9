"""Layer norms, which are no batch norms, and reductions over a batch."""

import tensorflow as tf

from geutil.select.networks.batch_norms import is_layer_norm, reduces_batch
from tests.select.layer_norms import fused_layer_norm

R = tf.raw_ops


def norm(shape=(None, 5, 8), **changes):
    return fused_layer_norm(tf.compat.v1.placeholder(tf.float32, shape), **changes)[1]


def norm_whose_statistics_are_read():
    made = norm()
    tf.identity(made.batch_mean)
    return made


def norm_of_images():
    """Return a batch norm of the same kind whose data is not reshaped."""
    x = tf.compat.v1.placeholder(tf.float32, [None, 8, 5, 5])
    parts = {"scale": tf.fill(tf.shape(x)[1:2], 1.0), "mean": [], "variance": []}
    parts["offset"] = tf.fill(tf.shape(x)[1:2], 0.0)
    return R.FusedBatchNormV3(x=x, **parts, data_format="NCHW", is_training=True)


NORMS = {
    "the layer norm of tf_keras": (norm, True),
    "a fixed batch": (lambda: norm([1, 5, 8]), True),
    "parameters": (lambda: norm(scale=tf.Variable(tf.ones([5]))), False),
    "ones of a fixed number": (lambda: norm(scale=tf.ones([5])), False),
    "channels last": (lambda: norm(data_format="NHWC"), False),
    "statistics that are read": (norm_whose_statistics_are_read, False),
    "data that is not reshaped": (norm_of_images, False),
}


def test_layer_norms():
    found = {}
    for name, (make, _) in NORMS.items():
        with tf.Graph().as_default():
            found[name] = is_layer_norm(make().y.op)
            assert not is_layer_norm(tf.ones([2]).op)
    assert found == {name: wanted for name, (_, wanted) in NORMS.items()}


v1 = tf.compat.v1
CASES = {
    "the batch": ([4, 8], [0], True),
    "the batch of images": ([4, 8, 8, 3], [0, 1, 2], True),
    "counted from the end": ([4, 8], [-2], True),
    "a row": ([4, 8], [1], False),
    "images one by one": ([4, 8, 8, 3], [1, 2], False),
    "everything": ([4, 8], [0, 1], False),
    "everything, counted from the end": ([4, 8], [-1, -2], False),
    "a vector": ([4], [0], False),
    "a batch of unknown rank": (None, [0], True),
    "a row of unknown rank": (None, [1], False),
}


def test_reductions_over_the_batch():
    found = {}
    for case, (shape, axes, _) in CASES.items():
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, shape)
            reduced = [tf.reduce_mean(x, axes), tf.reduce_sum(x, axes)]
            found[case] = [reduces_batch(t.op) for t in reduced]
    assert found == {case: [wanted] * 2 for case, (*_, wanted) in CASES.items()}
    # Other ops are none, nor are axes that are computed.
    with tf.Graph().as_default():
        x, axes = v1.placeholder(tf.float32, [4, 8]), v1.placeholder(tf.int32, [1])
        others = tf.reduce_max(x, [0]), tf.reduce_mean(x, axes)
        assert [reduces_batch(t.op) for t in others] == [False, False]
