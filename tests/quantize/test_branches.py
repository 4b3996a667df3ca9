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
v1 = tf.compat.v1
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


def test_batches_that_take_all_branches_or_not(branching):
    for method in ("best", "moving_average", "entropy"):
        report = calibrate(branching, batches(branching, True, False, True), method)
        assert report.ranges
        assert all(np.all(low < high) for low, high in report.ranges.values()), method
    with pytest.raises(QuantizeError, match=r"a branch which none of the 2 batches"):
        calibrate(branching, batches(branching, True, True))


@pytest.fixture
def version_1_flow():
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


def _branches(x, double, weights):
    more = [lambda: x @ weights, lambda: x @ tf.constant(2 * MATRIX)]
    return v1.cond(double, *more)


def _loop(x, double, weights):
    start = (0, x @ weights)
    body = lambda i, h: (i + 1, tf.tanh(h @ weights))  # noqa: E731
    return v1.while_loop(lambda i, _: i < 2, body, start)[1]


@pytest.mark.usefixtures("version_1_flow")
@pytest.mark.parametrize("flow", [_branches, _loop])
def test_weights_that_are_led_into_a_branch_or_a_loop(flow):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2, 4], name="x")
        double = v1.placeholder(tf.bool, [], name="double")
        tf.identity(flow(x, double, tf.constant(MATRIX)), name="y")
    m = model.open(graph, inputs=["x:0", "double:0"], outputs=["y:0"])
    report = quantize(m, is_training=False)
    names = [e.weights_range for e in report.quantized if e.weights is not None]
    ranges = calibrate(m, batches(m, True, False), "min_max").ranges
    highest = np.abs(MATRIX).max(0)
    expected = [highest, 2 * highest] if flow is _branches else [highest]
    np.testing.assert_allclose([ranges[name].high for name in names], expected)
