"""Which updates of a variable count as a moving average, for each client that asks."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ModelError
from tests.settings import needs_eager

v1 = tf.compat.v1


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
