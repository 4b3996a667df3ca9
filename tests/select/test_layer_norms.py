import tensorflow as tf

from geutil.select.networks.batch_norms import is_layer_norm
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
