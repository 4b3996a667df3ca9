"""The corrections against the formulas of Krishnamoorthi 2018, section 3.2.2."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.batchnorm.training.nets import CHANNELS, EPSILON, FoldedConv

v1 = tf.compat.v1


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
