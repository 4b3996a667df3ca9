"""One-hot vectors that are read by what is quantized."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.quantize import calibrate, quantize
from tests.quantize.converted import Together, opened, samples, spec
from tests.settings import needs_eager

pytestmark = needs_eager

MATRIX = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
IDS = spec(6, dtype=tf.int32)
ROWS = spec(6, 4)


def experts(x):
    """Return a mixture: each row is treated by the expert with the largest share."""
    shares = tf.nn.softmax(x @ MATRIX)
    largest, places = tf.math.top_k(shares, 2)
    mask = tf.reduce_sum(tf.one_hot(places, 5) * largest[..., None], 1)
    outputs = tf.stack([x * float(i + 1) for i in range(5)], 1)
    return tf.reduce_sum(outputs * mask[:, :, None], 1)


CASES = {
    "product": (lambda a: tf.one_hot(a, 4) @ MATRIX, (IDS,)),
    "other values": (lambda a: tf.one_hot(a, 4, 2.5, -0.5) @ MATRIX, (IDS,)),
    "axis": (lambda a: tf.matmul(tf.one_hot(a, 6, axis=0), tf.one_hot(a, 6)), (IDS,)),
    "reshaped": (
        lambda a, b: tf.reshape(tf.one_hot(a, 4)[:, None], [6, 4]) * b,
        (IDS, ROWS),
    ),
    "a result": (lambda a, b: (tf.one_hot(a, 4), b + 1.0), (IDS, ROWS)),
    "any batch": (lambda a: tf.one_hot(a, 4) @ MATRIX, (spec(None, dtype=tf.int32),)),
    "a value of data": (
        lambda a, b: tf.one_hot(a, 4, tf.reduce_max(b)) * b,
        (IDS, ROWS),
    ),
    "experts": (experts, (ROWS,)),
}


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_the_graph_computes_the_same(axis):
    def function(a):
        vectors = tf.one_hot(tf.reshape(a, [2, 3]), 4, 3.0, -1.0, axis)
        return tf.reduce_sum(tf.reshape(vectors, [-1, 4]) @ MATRIX, 0)

    m = opened(function, IDS)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    # Also for what is no index.
    ids = np.int32([0, 3, 4, -1, 1, 2])
    calibrate(m, {"a": ids})
    (found,) = m.run(a=ids).values()
    np.testing.assert_allclose(found, function(tf.constant(ids)), atol=1e-3)


def test_gradients_pass():
    weights = tf.Variable(MATRIX)
    m = opened(lambda a: {"y": tf.one_hot(a, 4) @ weights}, IDS)
    # A range that is learnt ends at the largest value, which rounding may put outside.
    quantize(m, is_training=False)
    trained = m.to_function()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trained(a=tf.constant([0, 1, 1, 2, 3, 3]))["y"])
    (gradient,) = tape.gradient(loss, [weights])
    np.testing.assert_allclose(
        gradient, np.tile([[1.0], [2.0], [1.0], [2.0]], 5), rtol=2e-2
    )


def test_one_hots_that_are_left_alone():
    m = opened(CASES["product"][0], IDS)
    report = quantize(m, is_training=False, overrides={"one_hot": "skip"})
    assert report.rewritten == ()
    kinds = [op.type for op in m.graph.get_operations()]
    assert "SelectV2" not in kinds
    assert samples(m.inputs)["a"].dtype == np.int32


def test_places_of_the_largest_alone_are_found_in_float():
    def best(x):
        scores = x @ MATRIX
        _, places = tf.math.top_k(scores, 2)
        return {"y": tf.nn.relu(scores), "best": places}

    part = Together({"best": (best, (ROWS,))}).part()
    skipped = {entry.op_type: entry.reason for entry in part.skipped}
    assert "places only" in skipped["TopKV2"]
    assert "TOPK_V2" in part.kinds


TYPES = {
    "int32": {"dtype": tf.int32},
    "int64": {"dtype": tf.int64, "on_value": 3},
    "uint8": {"dtype": tf.uint8},
    "bool": {"on_value": True, "off_value": False},
}


def cast(reshaped, **options):
    def function(a, b):
        vectors = tf.one_hot(a, 4, **options)
        if reshaped:
            vectors = tf.reshape(vectors, [6, 4])
        return tf.cast(vectors, tf.float32) @ MATRIX + b

    ids = spec(*([2, 3] if reshaped else [6]), dtype=tf.int32)
    return function, (ids, spec(6, 5))


def test_one_hots_are_int8():
    cases = {kind: cast(False, **options) for kind, options in TYPES.items()}
    cases |= {f"reshaped {k}": cast(True, **options) for k, options in TYPES.items()}
    wrong = {}
    for case, part in Together({**CASES, **cases}).parts().items():
        # What is cast from integers that stand in between is a float for that moment.
        moment = ["CAST", "QUANTIZE"] if case.startswith("reshaped ") else []
        right = "ONE_HOT" in part.kinds and part.floats == moment
        if case in CASES:
            right &= not part.skipped and all(
                "(OneHot) chooses by a mask" in line for line in part.rewritten
            )
        if not right or part.coverage < 1.0 or part.most > 2:
            wrong[case] = part
    assert wrong == {}
