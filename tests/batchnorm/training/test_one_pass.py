"""Folds that run each layer once: what runs, whose statistics they are, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.batchnorm.training.nets import EPSILON, FoldedConv, close, update, variable

v1 = tf.compat.v1
CHANNELS = 4


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["one range", "by channel"])
def test_the_norm_is_that_of_the_quantized_weights(fused, per_channel):
    net = FoldedConv(fused, bias=True, statistics="one_pass")
    with net.graph.as_default():
        quantize(net.graph, weight_bits=3, per_channel=per_channel)
        verify(net.graph)
        conv = net.graph.get_operation_by_name("conv_fold")
        parts = [net.out, conv.inputs[1], conv.inputs[0]]
        gradients = tf.gradients(tf.reduce_sum(net.out**2), [net.gamma_, net.beta_])
        start = v1.global_variables_initializer()
    data = np.float32(np.random.default_rng(0).normal(size=(3, 5, 5, 3)))
    with v1.Session(graph=net.graph) as session:
        session.run(start)
        (out, weights, x), gradients, _ = session.run(
            [parts, gradients, net.updates], {net.x: data}
        )
        averages = session.run(net.averages)
    scale = net.gamma / np.sqrt(net.variance + EPSILON)
    assert np.abs(weights - net.kernel * scale).max() > 0.05
    y = np.float64(x) @ (weights[0, 0] / scale) + net.bias
    mean, deviation = y.mean((0, 1, 2)), np.sqrt(y.var((0, 1, 2)) + EPSILON)
    normal = (y - mean) / deviation
    expected = np.maximum(normal * net.gamma + net.beta, 0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    through = 2 * expected
    close(gradients, [(through * normal).sum((0, 1, 2)), through.sum((0, 1, 2))])
    variance = y.var((0, 1, 2), ddof=int(fused))
    old = net.mean, net.variance
    close(
        averages,
        [0.9 * a + 0.1 * b for a, b in zip(old, (mean, variance), strict=True)],
    )


def test_a_gamma_of_zero_learns_with_quantized_weights():
    """As blocks start that shall do nothing at first."""
    with tf.Graph().as_default() as graph:
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 5, 5, 3)), tf.float32)
        x = v1.placeholder_with_default(x, [None, 5, 5, 3])
        kernel = variable(np.random.default_rng(1).normal(size=(3, 3, 3, CHANNELS)))
        made = []
        gamma = variable(np.zeros(CHANNELS))
        for scope in ("folded", "unfolded"):
            with tf.name_scope(scope):
                y = tf.nn.conv2d(x, kernel, 1, "SAME")
                mean, spread = tf.nn.moments(y, [0, 1, 2])
                kept = [variable(np.ones(CHANNELS), trainable=False) for _ in range(2)]
                _ = update(kept[0], mean, True), update(kept[1], spread, True)
                made.append(
                    tf.nn.batch_normalization(y, mean, spread, None, gamma, EPSILON)
                )
                made[-1] = tf.nn.relu(made[-1] + 1.0)
        fold_batch_norms(graph, is_training=True, scope="folded", statistics="one_pass")
        quantize(graph, scope="folded")
        weights = np.random.default_rng(2).normal(size=(4, 5, 5, CHANNELS))
        losses = [tf.reduce_sum(y * np.float32(weights)) for y in made]
        gradients = [tf.gradients(loss, gamma)[0] for loss in losses]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            folded, plain = session.run(gradients)
    # Data and weights have 8 bits; what they round is small beside the gradients.
    np.testing.assert_allclose(folded, plain, atol=0.05 * np.abs(plain).max())
    assert np.abs(plain).min() > 1.0


# -- more readers ----------------------------------------------------------------------


def _graph_with(build):
    """Build a graph of a convolution, with what `build` makes of it; fold it."""
    results = []
    random = np.random.default_rng(0)
    data = np.float32(random.normal(size=(6, 5, 5, 3)))
    kernel = np.float32(random.normal(size=(3, 3, 3, CHANNELS)))
    for folds in (True, False):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 5, 5, 3], "x")
            w = variable(kernel)
            y = tf.nn.conv2d(x, w, 1, "SAME", name="conv")
            values = [*build(y)]
            if folds:
                report = fold_batch_norms(
                    graph, is_training=True, statistics="one_pass"
                )
                verify(graph)
            values += tf.gradients(tf.add_n([tf.reduce_sum(v**2) for v in values]), w)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                results.append(session.run(values, {x: data}))
    return report, results


def _norm(y, name, part=None):
    with tf.name_scope(name):
        mean, spread = tf.nn.moments(y if part is None else part, [0, 1, 2])
        for statistic in (mean, spread):
            update(variable(np.ones(CHANNELS), trainable=False), statistic, True)
        z = tf.nn.batch_normalization(y, mean, spread, None, None, EPSILON)
        return tf.nn.relu(z)


READERS = {
    2: lambda y: [_norm(y, "one"), 2.0 * _norm(tf.identity(y), "two")],
    1: lambda y: [_norm(y, "norm"), tf.sigmoid(y)],
}


def test_several_norms_of_one_layer_and_other_readers():
    for norms, build in READERS.items():
        report, results = _graph_with(build)
        assert len(report.folded) == norms
        close(*results)


def _of_squares(y):
    """The variance is around another mean than the norm's."""
    mean = tf.reduce_mean(y, [0, 1, 2])
    spread = tf.reduce_mean(tf.math.squared_difference(y, 0.5), [0, 1, 2])
    for statistic in (mean, spread):
        update(variable(np.ones(CHANNELS), trainable=False), statistic, True)
    z = tf.nn.batch_normalization(y, mean, spread, None, None, EPSILON)
    return [tf.nn.relu(z)]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda y: [_norm(y, "norm", y[:2])], "is no mean of what the norm reads"),
        (_of_squares, "is no variance of what the norm reads"),
    ],
    ids=["part of the batch", "another mean"],
)
def test_statistics_of_something_else_are_refused(build, reason):
    report, results = _graph_with(build)
    assert report.folded == ()
    (refused,) = report.refused
    assert refused.reason == f"{reason}; pass statistics='exact'"
    close(*results)
