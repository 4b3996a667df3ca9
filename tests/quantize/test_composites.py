"""Activations that are several ops: told by what they compute, and int8."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from geutil.quantize import calibrate, quantize
from tests.quantize.converted import converted, is_simulated, opened, spec
from tests.select.layer_norms import fused_layer_norm
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(2, 8, 8, 4)
ALPHA = np.linspace(0.1, 0.4, 4).astype(np.float32)

ONE_OP = {
    "relu(x + 3) by hand": (lambda x: x * tf.nn.relu6(x + 3) / 6, "HARD_SWISH"),
    "hard_silu of Keras": (tf.keras.activations.hard_silu, "HARD_SWISH"),
    "gelu, erf": (tf.nn.gelu, "GELU"),
    "gelu, tanh": (lambda x: tf.nn.gelu(x, approximate=True), "GELU"),
    "gelu of Keras": (tf.keras.activations.gelu, "GELU"),
    "gelu by hand": (
        lambda x: 0.5 * x * (1 + tf.math.erf(x / math.sqrt(2))),
        "GELU",
    ),
    "leaky": (lambda x: tf.nn.leaky_relu(x, 0.1), "LEAKY_RELU"),
}


@pytest.mark.parametrize("activation", ONE_OP)
def test_an_activation_is_one_kernel(activation):
    function, kind = ONE_OP[activation]
    result = converted(function, IMAGE)
    assert result.kinds == [kind]
    assert len(result.fake_quants()) == 2
    assert result.most <= 1
    (end,) = {e.kernel for e in result.report.quantized if e.op_type != "Placeholder"}
    assert end in {e.op for e in result.report.quantized}


@pytest.mark.parametrize(
    "function",
    [tf.keras.activations.silu, tf.nn.silu, lambda x: x * tf.sigmoid(x)],
    ids=["Keras", "tf.nn", "by hand"],
)
def test_silu_is_a_sigmoid_and_a_product(function):
    result = converted(function, IMAGE)
    assert not result.floats
    assert "LOGISTIC" in result.kinds
    assert result.most <= 1


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        (tf.sigmoid, (0.0, 255 / 256)),
        (tf.nn.softmax, (0.0, 255 / 256)),
        (tf.tanh, (-1.0, 127 / 128)),
    ],
    ids=["sigmoid", "softmax", "tanh"],
)
def test_known_ranges_are_fixed(function, ends):
    result = converted(function, IMAGE)
    (op,) = [op for op in result.fake_quants() if op.type.endswith("Args")]
    assert (op.get_attr("min"), op.get_attr("max")) == pytest.approx(ends)
    assert len(result.report.variables) == 2
    assert result.most <= 1


def test_what_is_read_inside_is_no_composite():
    def function(x):
        inner = tf.nn.relu6(x + 3)
        return {"y": x * inner / 6, "inner": inner * 2.0}

    result = converted(function, IMAGE)
    assert "HARD_SWISH" not in result.kinds
    assert not result.floats
    assert result.most <= 1


def test_what_computes_something_else_is_no_composite():
    result = converted(lambda x: x * tf.nn.relu6(x + 2) / 6, IMAGE)
    assert "HARD_SWISH" not in result.kinds
    assert result.most <= 1


def prelu(x):
    return tf.nn.relu(x) + -tf.constant(ALPHA) * tf.nn.relu(-x)


def test_a_prelu_is_written_in_a_form_that_is_int8():
    result = converted(prelu, IMAGE)
    assert sorted(result.kinds) == ["ADD", "MINIMUM", "MUL", "QUANTIZE"]
    assert not result.report.skipped
    assert result.most <= 1
    (line,) = result.report.rewritten
    assert "a PReLU, computes relu(x) + alpha * min(x, 0)" in line


def test_a_prelu_computes_what_it_did():
    m = opened(prelu, IMAGE)
    x = np.random.default_rng(0).normal(size=IMAGE.shape).astype(np.float32)
    want = np.where(x > 0, x, ALPHA * x)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    (y,) = m.run(a=x).values()
    assert np.abs(y - want).max() < 1e-3
    before = m.graph.as_graph_def()
    again = quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    assert not again.rewritten
    assert m.graph.as_graph_def() == before


def test_the_prelu_of_keras():
    start = tf.keras.initializers.Constant(0.3)
    layer = tf.keras.layers.PReLU(start, shared_axes=[1, 2])
    layer.build(IMAGE.shape)
    result = converted(layer, IMAGE)
    assert not result.floats
    assert result.report.rewritten


def test_a_prelu_that_is_not_asked_for_stays():
    m = opened(prelu, IMAGE)
    report = quantize(m, is_training=False, overrides={"Relu_1": "skip"})
    assert not any("PReLU" in line for line in report.rewritten)


def test_layer_norms_are_int8():
    layer = tf.keras.layers.LayerNormalization()
    layer.build((2, 6, 8))
    result = converted(layer, spec(2, 6, 8))
    assert not result.floats
    assert not result.report.skipped
    assert all(is_simulated(t.op) for t in result.model.outputs.values())


def test_a_layer_norm_of_one_op_is_written_in_a_form_that_is_int8():
    result = converted(lambda x: fused_layer_norm(x)[0], spec(2, 6, 8))
    assert not result.floats
    assert not result.report.skipped
    (line,) = result.report.rewritten
    assert "a layer norm, computes (x - mean) * rsqrt(variance + epsilon)" in line


def test_a_layer_norm_of_one_op_computes_what_it_did():
    m = opened(lambda x: fused_layer_norm(x, 0.01)[0], spec(None, 6, 8))
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    layer = tf.keras.layers.LayerNormalization(epsilon=0.01)
    data = dict.fromkeys(m.inputs, x)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    calibrate(m, [data], "min_max")
    (y,) = m.run(**data).values()
    np.testing.assert_allclose(y, layer(x), atol=1e-3)
