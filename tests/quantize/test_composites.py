"""Activations that are several ops: told by what they compute, and int8."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from geutil.quantize import calibrate, quantize
from tests.quantize.converted import Together, is_simulated, opened, spec
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


SILU = {
    "silu of Keras": tf.keras.activations.silu,
    "silu": tf.nn.silu,
    "silu by hand": lambda x: x * tf.sigmoid(x),
}
KNOWN = {
    "sigmoid": (tf.sigmoid, (0.0, 255 / 256)),
    "softmax": (tf.nn.softmax, (0.0, 255 / 256)),
    "tanh": (tf.tanh, (-1.0, 127 / 128)),
}


def read_inside(x):
    inner = tf.nn.relu6(x + 3)
    return {"y": x * inner / 6, "inner": inner * 2.0}


NO_COMPOSITE = {
    "read inside": read_inside,
    "something else": lambda x: x * tf.nn.relu6(x + 2) / 6,
}


def test_activations_are_one_kernel_each():
    functions = {name: function for name, (function, _) in ONE_OP.items()}
    functions |= SILU | NO_COMPOSITE
    functions |= {name: function for name, (function, _) in KNOWN.items()}
    made = Together({name: (f, (IMAGE,)) for name, f in functions.items()})
    simulated = [op for op in made.model.graph.get_operations() if is_simulated(op)]
    wrong = {}
    for name, part in made.parts().items():
        rounded = [op for op in simulated if made.is_of(op.name, name)]
        right = not part.floats and part.most <= 1
        if name in ONE_OP:
            entries = [e for e in made.report.quantized if made.is_of(e.op, name)]
            (end,) = {e.kernel for e in entries if e.op_type != "Placeholder"}
            right &= part.kinds == [ONE_OP[name][1]] and len(rounded) == 2
            right &= end in {e.op for e in entries}
        elif name in SILU:
            right &= part.kinds == ["LOGISTIC", "MUL"]
        elif name in NO_COMPOSITE:
            right &= "HARD_SWISH" not in part.kinds
        else:
            (op,) = [op for op in rounded if op.type.endswith("Args")]
            ends = op.get_attr("min"), op.get_attr("max")
            right &= ends == pytest.approx(KNOWN[name][1])
            right &= sum(made.is_of(n, name) for n in made.report.variables) == 2
        if not right:
            wrong[name] = part
    assert wrong == {}


def prelu(x):
    return tf.nn.relu(x) + -tf.constant(ALPHA) * tf.nn.relu(-x)


def test_prelus_and_layer_norms_are_written_in_forms_that_are_int8():
    start = tf.keras.initializers.Constant(0.3)
    layer = tf.keras.layers.PReLU(start, shared_axes=[1, 2])
    layer.build(IMAGE.shape)
    norm = tf.keras.layers.LayerNormalization()
    norm.build((2, 6, 8))
    rows = (spec(2, 6, 8),)
    made = Together(
        {
            "prelu": (prelu, (IMAGE,)),
            "prelu of Keras": (layer, (IMAGE,)),
            "norm of Keras": (norm, rows),
            "norm of one op": (lambda x: fused_layer_norm(x)[0], rows),
        }
    )
    parts = made.parts()
    assert {name: part for name, part in parts.items() if not part.is_int8} == {}
    assert sorted(parts["prelu"].kinds) == ["ADD", "MINIMUM", "MUL", "QUANTIZE"]
    assert parts["prelu"].most <= 1
    (line,) = parts["prelu"].rewritten
    assert "a PReLU, computes relu(x) + alpha * min(x, 0)" in line
    assert parts["prelu of Keras"].rewritten
    ends = made.model.outputs.items()
    assert all(is_simulated(t.op) for n, t in ends if made.is_of(n, "norm of Keras"))
    (line,) = parts["norm of one op"].rewritten
    assert "a layer norm, computes (x - mean) * rsqrt(variance + epsilon)" in line


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
    # One that is not asked for stays.
    report = quantize(
        opened(prelu, IMAGE), is_training=False, overrides={"Relu_1": "skip"}
    )
    assert not any("PReLU" in line for line in report.rewritten)


def test_a_layer_norm_of_one_op_computes_what_it_did():
    m = opened(lambda x: fused_layer_norm(x, 0.01)[0], spec(None, 6, 8))
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    layer = tf.keras.layers.LayerNormalization(epsilon=0.01)
    data = dict.fromkeys(m.inputs, x)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    calibrate(m, [data], "min_max")
    (y,) = m.run(**data).values()
    np.testing.assert_allclose(y, layer(x), atol=1e-3)
