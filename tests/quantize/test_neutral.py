"""Sums with zeros and products with ones, which a network may have to be trained."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.quantize.converted import converted, spec
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(1, 8, 8, 4)
random = np.random.default_rng(0)
FIRST = random.normal(size=(3, 3, 4, 4)).astype(np.float32) * 0.3
SECOND = random.normal(size=(2, 2, 4, 4)).astype(np.float32) * 0.1
LAST = random.normal(size=(3, 3, 8, 4)).astype(np.float32) * 0.3
AROUND, NONE = [[0, 0], [0, 1], [0, 1], [0, 0]], [[0, 0]] * 4


@pytest.mark.parametrize("shift", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_learnable_affine_blocks_that_are_joined(scale, shift):
    scales = [tf.Variable(scale) for _ in range(2)]
    shifts = [tf.Variable(shift) for _ in range(2)]

    def block(a, kernel, index):
        y = tf.nn.relu(tf.nn.conv2d(a, kernel, 1, "VALID"))
        return y * scales[index] + shifts[index]

    def function(a):
        padded = tf.pad(block(a, FIRST, 0), AROUND)
        pooled = tf.nn.max_pool2d(padded, 2, 1, "VALID")
        joined = tf.concat([pooled, block(tf.pad(padded, NONE), SECOND, 1)], -1)
        return tf.nn.conv2d(joined, LAST, 1, "SAME")

    result = converted(function, IMAGE)
    assert result.report.coverage == 1.0
    assert result.floats == []
    assert result.most <= 1


NEUTRAL = {
    "sum": lambda y, zeros, ones: y + zeros,
    "reversed": lambda y, zeros, ones: zeros + y,
    "difference": lambda y, zeros, ones: y - zeros,
    "product": lambda y, zeros, ones: y * ones,
    "quotient": lambda y, zeros, ones: y / ones,
    "both": lambda y, zeros, ones: y * ones + zeros,
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", NEUTRAL)
def test_what_changes_nothing(case, rank):
    zeros, ones = (tf.Variable(np.full([4] * rank, v, np.float32)) for v in (0, 1))

    def function(a):
        y = tf.nn.relu(tf.nn.conv2d(a, FIRST, 1, "SAME"))
        changed = NEUTRAL[case](y, zeros, ones)
        return tf.concat([tf.nn.max_pool2d(changed, 2, 1, "SAME"), 3.0 * y], -1)

    result = converted(function, IMAGE)
    assert result.report.coverage == 1.0
    assert result.floats == []
    assert result.most <= 1
