"""Sums with zeros and products with ones, which a network may have to be trained."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph.tflite_runtime import new_interpreter
from geutil.quantize import quantize
from tests.quantize.converted import Together, alternate, opened, samples, spec
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(1, 8, 8, 4)
random = np.random.default_rng(0)
FIRST = random.normal(size=(3, 3, 4, 4)).astype(np.float32) * 0.3
SECOND = random.normal(size=(2, 2, 4, 4)).astype(np.float32) * 0.1
LAST = random.normal(size=(3, 3, 8, 4)).astype(np.float32) * 0.3
AROUND, NONE = [[0, 0], [0, 1], [0, 1], [0, 0]], [[0, 0]] * 4


def affine(scale, shift, factor):
    """Return learnable affine blocks that are joined, with weights of their own."""
    scales = [tf.Variable(scale) for _ in range(2)]
    shifts = [tf.Variable(shift) for _ in range(2)]

    def block(a, kernel, index):
        y = tf.nn.relu(tf.nn.conv2d(a, kernel, 1, "VALID"))
        return y * scales[index] + shifts[index]

    def function(a):
        padded = tf.pad(block(a, factor * FIRST, 0), AROUND)
        pooled = tf.nn.max_pool2d(padded, 2, 1, "VALID")
        second = block(tf.pad(padded, NONE), factor * SECOND, 1)
        joined = tf.concat([pooled, second], -1)
        return tf.nn.conv2d(joined, factor * LAST, 1, "SAME")

    return function, (IMAGE,)


NEUTRAL = {
    "sum": lambda y, zeros, ones: y + zeros,
    "reversed": lambda y, zeros, ones: zeros + y,
    "difference": lambda y, zeros, ones: y - zeros,
    "product": lambda y, zeros, ones: y * ones,
    "quotient": lambda y, zeros, ones: y / ones,
    "both": lambda y, zeros, ones: y * ones + zeros,
}


def unchanged(change, rank, factor):
    zeros, ones = (tf.Variable(np.full([4] * rank, v, np.float32)) for v in (0, 1))

    def function(a):
        y = tf.nn.relu(tf.nn.conv2d(a, factor * FIRST, 1, "SAME"))
        changed = change(y, zeros, ones)
        return tf.concat([tf.nn.max_pool2d(changed, 2, 1, "SAME"), 3.0 * y], -1)

    return function, (IMAGE,)


def numbered(make, cases):
    """Return functions by name, each made with a factor of its own for its weights."""
    return {
        name: make(*case, np.float32(1 + 0.01 * n))
        for n, (name, case) in enumerate(cases.items())
    }


def test_what_a_network_may_have_to_be_trained():
    blocks = itertools.product([1.0, 1.3], [0.0, 0.2])
    cases = numbered(affine, {f"affine {n}": case for n, case in enumerate(blocks)})
    neutral = alternate(NEUTRAL, (0, 1))
    cases |= numbered(
        unchanged, {f"{n} of rank {rank}": (NEUTRAL[n], rank) for n, rank in neutral}
    )
    parts = Together(cases).parts()
    assert {n: p for n, p in parts.items() if not p.is_int8 or p.most > 1} == {}


CONSTANT = {
    "sum": lambda y: y + 0.0,
    "reversed sum": lambda y: 0.0 + y,
    "difference": lambda y: y - tf.zeros([1]),
    "product": lambda y: y * 1.0,
    "reversed product": lambda y: tf.ones([1, 1]) * y,
    "quotient": lambda y: y / 1.0,
    "both": lambda y: (y * 1.0 + 0.0) * 1.0,
}


def between_layers(change, factor):
    bias = factor * np.float32([1, 2, 3, 4])

    def function(a):
        y = change(tf.nn.conv2d(a, factor * FIRST, 1, "SAME"))
        return tf.nn.conv2d(tf.nn.relu(y + bias), factor * FIRST, 1, "SAME")

    return function, (IMAGE,)


CHANGING = {
    "reversed difference": lambda y: 0.0 - y,
    "reciprocal": lambda y: 1.0 / (1.0 + tf.abs(y)),
    "more axes": lambda y: tf.ones([2, 1, 8, 8, 4])[:, 0] * y,
}


def test_constants_cost_nothing_where_they_change_nothing():
    cases = numbered(between_layers, {name: (f,) for name, f in CONSTANT.items()})
    cases |= {
        name: (lambda a, f=change: f(tf.nn.conv2d(a, FIRST, 1, "SAME")), (IMAGE,))
        for name, change in CHANGING.items()
    }
    wrong = {}
    for case, part in Together(cases).parts().items():
        if case in CONSTANT:
            right = part.is_int8 and part.kinds == ["CONV_2D", "CONV_2D"]
        else:
            right = case == "reciprocal" or {"Sub", "Mul"} & set(part.types)
        if not right or part.most > (1 if case in CONSTANT else 2):
            wrong[case] = part
    assert wrong == {}


def test_inputs_outputs_and_other_types():
    def function(a, b):
        words = tf.strings.as_string(b) + tf.constant("")
        return {
            "first": a * 1.0,
            "last": tf.nn.relu(tf.nn.conv2d(a, FIRST, 1, "SAME")) + 0.0,
            "whole": tf.gather(tf.range(9.0), b + 0),
            "words": tf.strings.length(words + tf.constant("")),
        }

    m = opened(function, IMAGE, spec(3, dtype=tf.int32))
    before = samples(m.inputs)
    expected = m.run(**before)
    report = quantize(m, is_training=False)
    assert report.coverage == 1.0
    found = m.run(**before)
    np.testing.assert_array_equal(found["words"], expected["words"])
    np.testing.assert_allclose(found["first"], expected["first"], atol=0.03)


@pytest.mark.parametrize("training", [False, True])
def test_a_product_with_one_is_passed_in_training_too(training):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 8, 8, 4])
        y = tf.nn.conv2d(x, FIRST, 1, "SAME", name="conv")
        z = tf.multiply(1.0, tf.nn.relu(y), name="same")
        tf.nn.conv2d(z, FIRST, 1, "SAME", name="second")
    report = quantize(graph, is_training=training)
    entries = {entry.op: entry for entry in report.quantized}
    assert entries["same"].result is None
    assert "same" not in " ".join(report.variables)


@pytest.mark.parametrize("layer", [tf.nn.conv2d, tf.nn.depthwise_conv2d])
def test_names_of_what_rounds_weights_take_little_room(layer):
    strides = [1, 1, 1, 1]
    function = lambda a: layer(a, FIRST, strides, "SAME", name="conv") + 1.0  # noqa: E731
    interpreter = new_interpreter(Together({"layer": (function, (IMAGE,))}).blob)
    names = [d["name"] for d in interpreter.get_tensor_details()]
    assert not any("weights_quant" in name for name in names)
    assert any("conv" in name for name in names)
