"""Batch norms of any make, and the variables that follow their moments."""

import numpy as np
import pytest
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


def assigned(v, s):
    return v.assign(v * 0.9 + s * 0.1)


def subtracted(v, s):
    return v.assign_sub((v - s) * 0.1)


def divided(v, s):
    return v.assign_sub((v - s) / 10.0)


def chosen(v, s):
    return v.assign(tf.where(v > 0.0, v * 0.9 + s * 0.1, v))


def squared(v, s):
    return v.assign(tf.square(s))


def replaced(v, s):
    return v.assign(s)


# By update: whether it counts for folds for inference, folds in training, stripping.
ACCEPTED = {
    assigned: (True, True, True),
    subtracted: (True, True, True),
    divided: (True, True, False),
    chosen: (True, False, True),
    squared: (True, False, False),
    replaced: (True, False, False),
}


X, KERNEL = (np.float32(np.random.default_rng(0).random(n)) for n in ((8, 2), (2, 3)))
MOVING = {
    "moving_mean": np.float32([1, 2, 3]),
    "moving_variance": np.float32([4, 5, 6]),
}
EPSILON = 1e-3


def norm_of_layer(update):
    """Return the graph of a layer and its norm, whose variables are updated so."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8, 2], name="x")
        y = tf.matmul(x, KERNEL)
        mean, variance = tf.nn.moments(y, [0])
        updates = [
            update(v1.Variable(value, use_resource=True, name=name), statistic)
            for (name, value), statistic in zip(
                MOVING.items(), (mean, variance), strict=True
            )
        ]
        y = tf.nn.batch_normalization(y, mean, variance, None, None, EPSILON)
        with tf.control_dependencies(updates):
            tf.identity(y, name="y")
    return graph


def result(graph):
    """Return the result, with the values that the variables have at first."""
    y = graph.get_tensor_by_name("y:0")
    assignments = [op for op in graph.get_operations() if "Assign" in op.type]
    assert assignments
    with v1.Session(graph=graph) as session:
        session.run([op for op in assignments if op.name.endswith("/Assign")])
        return session.run(y, {"x:0": X})


def moving_result():
    """Return the result by the moving statistics, computed by numpy."""
    centred = X @ KERNEL - MOVING["moving_mean"]
    return centred / np.sqrt(MOVING["moving_variance"] + EPSILON)


each_update = pytest.mark.parametrize(
    "update", ACCEPTED, ids=lambda update: update.__name__
)


@each_update
def test_what_folding_accepts(update):
    at_inference, in_training, _ = ACCEPTED[update]
    graph = norm_of_layer(update)
    report = fold_batch_norms(graph, assume_inference=True)
    assert len(report.folded) == at_inference
    np.testing.assert_allclose(result(graph), moving_result(), rtol=1e-4, atol=1e-5)

    report = fold_batch_norms(norm_of_layer(update), is_training=True)
    assert (len(report.folded), len(report.refused)) == (in_training, not in_training)


@needs_eager
@each_update
def test_what_stripping_accepts(update):
    _, _, stripping = ACCEPTED[update]
    opened = model.open(norm_of_layer(update), outputs=["y"])
    for name, value in MOVING.items():
        opened.variables[name].assign(value)
    if stripping:
        found = opened.strip_training().run(x=X)["y"]
        np.testing.assert_allclose(found, moving_result(), rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ModelError, match="moves a variable towards its mean"):
            opened.strip_training()
