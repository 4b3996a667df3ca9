"""Biases behind a Reshape that parts the channels of a layer: heads of an attention."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.quantize import Spec, calibrate, quantize
from tests.quantize.converted import converted, is_simulated, opened, samples, spec
from tests.settings import needs_eager

pytestmark = needs_eager

random = np.random.default_rng(0)
ROWS = spec(2, 5, 8)


def weights(*shape):
    return random.normal(0.0, 0.5, shape).astype(np.float32)


MATRIX, BIAS = weights(8, 12), weights(3, 4)


def parted_sum(a, bias, shape=(2, 5, 3, 4)):
    parted = tf.reshape(tf.matmul(a, MATRIX, name="layer"), shape, name="parted")
    return tf.add(parted, bias, name="sum")


def heads(a):
    return parted_sum(a, BIAS)


def of_one_more_axis(a):
    return parted_sum(a, BIAS[None, None])


def behind_a_convolution(a):
    image = tf.reshape(a, [2, 5, 1, 8])
    y = tf.nn.conv2d(image, MATRIX[None, None], 1, "SAME", name="layer")
    return tf.add(tf.reshape(y, [2, 5, 3, 4], name="parted"), BIAS, name="sum")


def lowered(report):
    return [line for line in report.rewritten if "before a Reshape" in line]


def results(m):
    """Return the types of the ops whose results are rounded, parameters left out."""
    return [
        op.inputs[0].op.type
        for op in m.graph.get_operations()
        if is_simulated(op) and "weights_quant" not in op.name
    ]


@pytest.mark.parametrize("function", [heads, of_one_more_axis, behind_a_convolution])
def test_the_kernel_of_the_layer_adds_it(function):
    result = converted(lambda a: tf.nn.sigmoid(function(a)), ROWS)
    assert len(lowered(result.report)) == 1
    assert "ADD" not in result.kinds
    assert not result.floats
    assert result.most <= 1
    assert "AddV2" not in results(result.model)


def test_the_sum_is_what_it_was():
    """To float32: with ranges that nothing is rounded in, but for 16 bits."""
    m = opened(heads, ROWS)
    data = samples(m.inputs)
    exact = heads(data["a"]).numpy()
    report = quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    assert lowered(report)
    ge.verify(m.graph)
    calibrate(m, [data], "min_max")
    found = next(iter(m.run(**data).values()))
    assert np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()
    assert not np.array_equal(found, exact)


def two_readers(a):
    parted = tf.reshape(tf.matmul(a, MATRIX), [2, 5, 3, 4])
    return {"sum": parted + BIAS, "other": tf.nn.sigmoid(parted)}


def also_a_result(a):
    parted = tf.reshape(tf.matmul(a, MATRIX), [2, 5, 3, 4])
    return {"sum": parted + BIAS, "parted": parted}


def of_data(a):
    parted = tf.reshape(tf.matmul(a, MATRIX), [2, 5, 3, 4])
    return parted + tf.reshape(a[0, 0, :4], [1, 4]) * tf.ones([3, 1])


def of_places(a):
    """A table of places and channels is no bias."""
    return tf.reshape(tf.matmul(a, MATRIX), [2, 5, 12]) + weights(5, 12)


def of_a_part(a):
    return parted_sum(a, BIAS[0])


def turned_before(a):
    parted = tf.reshape(tf.matmul(a, MATRIX), [2, 5, 3, 4])
    return tf.transpose(parted, [0, 2, 1, 3]) + BIAS[:, None]


def no_layer(a):
    return (
        tf.reshape(tf.nn.sigmoid(tf.concat([a, a[..., :4]], -1)), [2, 5, 3, 4]) + BIAS
    )


@pytest.mark.parametrize(
    "function",
    [
        two_readers,
        also_a_result,
        of_data,
        of_places,
        of_a_part,
        turned_before,
        no_layer,
    ],
)
def test_others_stay(function):
    m = opened(function, ROWS)
    report = quantize(m, is_training=False)
    assert not lowered(report)
    assert report.coverage == 1.0


@pytest.mark.parametrize("key", ["^sum$", "^layer$", "^parted$"])
def test_what_is_skipped_stays(key):
    m = opened(heads, ROWS)
    assert not lowered(quantize(m, is_training=False, overrides={key: "skip"}))


def test_an_override_for_the_sum_is_obeyed():
    m = opened(heads, ROWS)
    total = m.graph.get_operation_by_name("sum")
    report = quantize(m, is_training=False, overrides={total: Spec(activation_bits=16)})
    assert lowered(report)
    (layer,) = [entry for entry in report.quantized if entry.op_type == "BatchMatMulV2"]
    assert layer.result.bits == 16
