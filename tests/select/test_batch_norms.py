"""Layer norms, which are no batch norms, and reductions over a batch."""

import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ModelError
from tests.select.layer_norms import fused_layer_norm
from tests.settings import needs_eager

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
    """Folds name batch norms that they refuse, and say nothing of layer norms."""
    found = {}
    for name, (make, _) in NORMS.items():
        with tf.Graph().as_default() as graph:
            made = make().y.op
        report = fold_batch_norms(graph)
        assert report.folded == ()
        found[name] = report.refused == ()
        assert [entry.norm for entry in report.refused] == [made.name][found[name] :]
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


REDUCTIONS = {
    "mean": tf.reduce_mean,
    "weighted mean": lambda x, axes, keepdims: tf.math.divide(
        tf.reduce_sum(x * 2.0, axes, keepdims),
        tf.reduce_sum(tf.ones_like(x) * 2.0, axes, keepdims),
    ),
}


def is_of_batch(shape, axes, reduce):
    """Tell whether a norm by such moments is found to use the statistics of a batch."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape, name="x")
        if axes is None:
            axes = v1.placeholder(tf.int32, [1], name="axes")
        mean = reduce(x, axes, True)
        variance = reduce(tf.math.squared_difference(x, mean), axes, True)
        y = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
    opened = model.open(graph, outputs=[y.name])
    try:
        report = opened.strip_training().strip_report
    except ModelError as error:
        # It has no moving averages to read in their place.
        assert f"'{variance.op.name}': nothing that runs moves a variable" in str(error)
        return True
    assert report.entries == ()
    return False


@needs_eager
def test_reductions_over_the_batch():
    for name, reduce in REDUCTIONS.items():
        found = {
            case: is_of_batch(*given, reduce) for case, (*given, _) in CASES.items()
        }
        assert found == {case: wanted for case, (*_, wanted) in CASES.items()}, name
    # Other ops are none, nor are axes that are computed.
    assert not is_of_batch([4, 8], [0], tf.reduce_max)
    assert not is_of_batch([4, 8], None, tf.reduce_mean)
