"""The two ways to take statistics: the corrections of a paper, or each layer once.

The paper is Krishnamoorthi 2018, section 3.2.2.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.batchnorm.training.nets import EPSILON, close, update, variable

v1 = tf.compat.v1
CHANNELS = 4


class FoldedConv:
    """A convolution with a norm in training, folded, and the values of its weights."""

    def __init__(self, fused, bias=False, **options):
        random = np.random.default_rng(1)
        self.kernel = random.normal(size=(1, 1, 3, CHANNELS))
        self.gamma, self.beta, self.bias, self.mean = random.normal(size=(4, CHANNELS))
        self.variance = random.uniform(0.1, 5.0, CHANNELS)
        with tf.Graph().as_default() as self.graph:
            self.x = v1.placeholder(tf.float32, [None, None, None, 3])
            y = tf.nn.conv2d(self.x, variable(self.kernel), 1, "SAME", name="conv")
            y = tf.nn.bias_add(y, variable(self.bias)) if bias else y
            self.gamma_, self.beta_ = variable(self.gamma), variable(self.beta)
            if fused:
                z, *batch = v1.nn.fused_batch_norm(
                    y, self.gamma_, self.beta_, epsilon=EPSILON
                )
            else:
                batch = tf.nn.moments(y, [0, 1, 2])
                z = tf.nn.batch_normalization(
                    y, *batch, self.beta_, self.gamma_, EPSILON
                )
            moving = self.mean, self.variance
            self.averages = [variable(values, trainable=False) for values in moving]
            pairs = zip(self.averages, batch, strict=True)
            self.updates = [update(*pair, True) for pair in pairs]
            self.out = tf.nn.relu(z, name="result")
            self.report = fold_batch_norms(self.graph, is_training=True, **options)


def _of_the_paper(gamma, beta, batch, moving, frozen):
    """Return scales of weights and result, and the bias, by the paper's own steps."""
    (mean, variance), (moving_mean, moving_variance) = batch, moving
    sigma, moving_sigma = (np.sqrt(v + EPSILON) for v in (variance, moving_variance))
    correction_scale = sigma / moving_sigma
    correction_offset = gamma * (mean / sigma - moving_mean / moving_sigma)
    weights = gamma / sigma * correction_scale
    bias = beta - gamma * mean / sigma
    if frozen:
        return weights, np.ones(CHANNELS), bias + correction_offset
    return weights, 1.0 / correction_scale, bias


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_they_are_where_the_paper_has_them(fused):
    folded = FoldedConv(fused, freeze_batch_norm_delay=2)
    moving = folded.mean, folded.variance
    add = folded.graph.get_operation_by_name(folded.report.folded[0].into)
    rescaled = add.inputs[0].op
    conv = rescaled.inputs[0].op
    assert [op.type for op in (conv, rescaled, add)] == ["Conv2D", "Mul", "BiasAdd"]
    assert conv.inputs[0] is folded.x
    parts = [conv.inputs[1], rescaled.inputs[1], add.inputs[1]]
    random, seen = np.random.default_rng(2), []
    with v1.Session(graph=folded.graph) as session, folded.graph.as_default():
        session.run(v1.global_variables_initializer())
        for frozen in (False, True):
            x = np.float32(random.normal(size=(2, 4, 4, 3)))
            made = session.run(parts, {folded.x: x})
            y = x @ folded.kernel[0, 0]
            batch = y.mean((0, 1, 2)), y.var((0, 1, 2))
            scale, *expected = _of_the_paper(
                folded.gamma, folded.beta, batch, moving, frozen
            )
            expected.insert(0, folded.kernel * scale)
            for one, other in zip(made, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
            seen.append(made[0])
    # The batches differ, and the weights do not: so they can be quantized.
    assert (seen[0] == seen[1]).all()


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
