"""The corrections against the formulas of Krishnamoorthi 2018, section 3.2.2."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.batchnorm.fold_arithmetic import Affine
from geutil.batchnorm.training_build import corrected, unbiased
from tests.batchnorm.training.nets import EPSILON, update, variable

v1 = tf.compat.v1
CHANNELS = 5


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


def _statistics(random):
    return random.normal(size=CHANNELS), random.uniform(0.1, 4.0, CHANNELS)


@pytest.mark.parametrize("frozen", [False, True])
def test_they_are_those_of_the_paper(frozen):
    random = np.random.default_rng(0)
    gamma, beta = random.normal(size=(2, CHANNELS))
    batch, moving = _statistics(random), _statistics(random)

    def affine(mean, variance):
        scale = gamma / np.sqrt(variance + EPSILON)
        return Affine(scale, beta - mean * scale)

    ratio = np.sqrt(moving[1] + EPSILON) / np.sqrt(batch[1] + EPSILON)
    made = corrected(affine(*batch), affine(*moving), ratio, tf.constant(frozen))
    expected = _of_the_paper(gamma, beta, batch, moving, frozen)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_unbiased_is_numpys():
    values = np.random.default_rng(0).normal(size=(7, 3))
    made = unbiased(tf.constant(values.var(0)), tf.constant(7.0, tf.float64))
    np.testing.assert_allclose(made, values.var(0, ddof=1), rtol=1e-12)


class Folded:
    """A folded conv, and what it is made of."""

    def __init__(self, fused):
        random = np.random.default_rng(1)
        self.kernel = random.normal(size=(1, 1, 3, CHANNELS))
        self.gamma, self.beta = random.normal(size=(2, CHANNELS))
        self.moving = _statistics(random)
        with tf.Graph().as_default() as self.graph:
            self.x = v1.placeholder(tf.float32, [None, None, None, 3])
            y = tf.nn.conv2d(self.x, variable(self.kernel), 1, "SAME", name="conv")
            gamma, beta = variable(self.gamma), variable(self.beta)
            if fused:
                z, *batch = v1.nn.fused_batch_norm(y, gamma, beta, epsilon=EPSILON)
            else:
                batch = tf.nn.moments(y, [0, 1, 2])
                z = tf.nn.batch_normalization(y, *batch, beta, gamma, EPSILON)
            for values, statistic in zip(self.moving, batch, strict=True):
                update(variable(values, trainable=False), statistic, True)
            tf.nn.relu(z, name="result")
            report = fold_batch_norms(
                self.graph, is_training=True, freeze_batch_norm_delay=2
            )
            self.start = v1.global_variables_initializer()
        add = self.graph.get_operation_by_name(report.folded[0].into)
        rescaled = add.inputs[0].op
        conv = rescaled.inputs[0].op
        self.types = [op.type for op in (conv, rescaled, add)]
        self.data = conv.inputs[0]
        self.parts = [conv.inputs[1], rescaled.inputs[1], add.inputs[1]]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_they_are_where_the_paper_has_them(fused):
    folded = Folded(fused)
    assert folded.types == ["Conv2D", "Mul", "BiasAdd"]
    assert folded.data is folded.x
    random, seen = np.random.default_rng(2), []
    with v1.Session(graph=folded.graph) as session:
        session.run(folded.start)
        for frozen in (False, True):
            x = np.float32(random.normal(size=(2, 4, 4, 3)))
            made = session.run(folded.parts, {folded.x: x})
            y = x @ folded.kernel[0, 0]
            batch = y.mean((0, 1, 2)), y.var((0, 1, 2))
            scale, *expected = _of_the_paper(
                folded.gamma, folded.beta, batch, folded.moving, frozen
            )
            expected.insert(0, folded.kernel * scale)
            for one, other in zip(made, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
            seen.append(made[0])
    # The batches differ, and the weights do not: so they can be quantized.
    assert (seen[0] == seen[1]).all()
