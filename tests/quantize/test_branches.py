"""Ranges in branches of version 1, of which each batch takes one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import QuantizeError
from geutil.quantize import calibrate, quantize
from tests.settings import needs_eager

pytestmark = needs_eager
raw = tf.raw_ops
MATRIX = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


@pytest.fixture
def branching():
    """A model that doubles what it reads if it is told so, and multiplies otherwise."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2, 4], name="x")
        double = tf.compat.v1.placeholder(tf.bool, [], name="double")
        no, yes = raw.Switch(data=tf.nn.relu(x @ MATRIX), pred=double)
        taken = raw.Merge(inputs=[no @ MATRIX, yes + yes])
        tf.identity(taken.output, name="y")
    m = model.open(graph, inputs=["x:0", "double:0"], outputs=["y:0"])
    quantize(m, is_training=False)
    return m


def batches(m, *choices):
    x, double = m.inputs
    random = np.random.default_rng(1)
    rows = random.uniform(-1, 1, (len(choices), 2, 4)).astype(np.float32)
    return [{x: row, double: np.bool_(c)} for row, c in zip(rows, choices, strict=True)]


@pytest.mark.parametrize("method", ["best", "moving_average", "entropy"])
def test_batches_that_take_all_branches(branching, method):
    report = calibrate(branching, batches(branching, True, False, True), method)
    assert report.ranges
    assert all(np.all(low < high) for low, high in report.ranges.values())


def test_a_branch_that_no_batch_takes(branching):
    with pytest.raises(QuantizeError, match=r"a branch which none of the 2 batches"):
        calibrate(branching, batches(branching, True, True))
