"""Matrices with a range for each column, in int8 files."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph.tflite_files import ops_of
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from geutil.quantize.int8.running import interpreter_of
from tests.quantize.converted import Together
from tests.quantize.converted import spec as plain_spec
from tests.quantize.small_networks import STORES_COLUMNS, normal, opened, spec
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager
stores_columns = pytest.mark.skipif(
    not STORES_COLUMNS, reason="TensorFlow 2.16 stores one range for a matrix"
)

VECTOR = spec([None, 8], "x")
IMAGE = spec([None, 8, 8, 3], "x")
X = normal(16, 8, seed=4)
ROWS = normal(4, 4, 8, seed=6)
IMAGES = normal(4, 8, 8, 3, seed=5)
# Columns of which the last is thirty times as large as the first.
MATRIX = normal(8, 6) * np.geomspace(0.1, 3.0, 6, dtype=np.float32)
BIAS = normal(6, seed=1)
KERNEL = normal(3, 3, 3, 6) * np.geomspace(0.1, 3.0, 6, dtype=np.float32)


def dense(matrix=MATRIX, bias=BIAS):
    def compute(x):
        y = tf.matmul(x, tf.constant(matrix), name="dense")
        return {"y": y if bias is None else tf.nn.relu(y + bias)}

    return opened(compute, VECTOR)


def quantized(m, data=X, **options):
    quantize(m, **{"is_training": False, **options})
    calibrate(m, {"x": data})
    return m


PRODUCTS = {
    "batches": lambda x, m, name: tf.raw_ops.BatchMatMulV2(x=x, y=m, name=name),
    "einsum": lambda x, m, name: tf.einsum("abc,cd->abd", x, m, name=name),
    "tensordot": lambda x, m, name: tf.tensordot(x, m, 1, name=name),
    "matmul": lambda x, m, name: tf.matmul(x, m, name=name),
}


@stores_columns
def test_products_of_batches_with_a_matrix():
    rows = (plain_spec(None, 4, 8),)
    made = Together(
        {n: (lambda x, f=f: f(x, MATRIX, "dense"), rows) for n, f in PRODUCTS.items()}
    )
    for name, part in made.parts().items():
        stored = [t for t in made.tensors(name) if list(t.shape) == [6, 8]]
        assert [len(t.quantization.scale) for t in stored] == [6], name
        assert part.most <= 1, name


def weight_steps(blob):
    """Return the steps of the weights in a file, and along which axis they count."""
    (details,) = [
        d["quantization_parameters"]
        for d in interpreter_of(blob).get_tensor_details()
        if list(d["shape"]) == [6, 8]
    ]
    return details["scales"], details["quantized_dimension"]


@stores_columns
@pytest.mark.parametrize(
    ("bias", "delay"), [(None, 5), (BIAS, None)], ids=["bare", "bias"]
)
def test_the_file_has_a_range_for_each_column(bias, delay):
    training = {"is_training": True, "quant_delay": delay} if delay else {}
    m = quantized(dense(bias=bias), **training)
    blob = to_int8(m)
    assert [op.kind for op in ops_of(blob)] == ["FULLY_CONNECTED"]
    steps, axis = weight_steps(blob)
    np.testing.assert_allclose(steps, np.abs(MATRIX).max(0) / 127, rtol=1e-6)
    assert axis == 0
    assert compare_int8(m, blob, {"x": X}).most <= 1


def test_where_columns_cannot_be_stored_a_warning_says_so(caplog):
    to_int8(quantized(dense()))
    warned = any("one range for all columns" in m for m in caplog.messages)
    assert warned is not STORES_COLUMNS


def test_one_range_can_be_asked_for():
    m = quantized(dense(), per_channel=False)
    steps, _ = weight_steps(to_int8(m))
    assert len(steps) == 1


def test_transposed_matrices_have_one_range():
    def compute(x):
        return {"y": tf.matmul(x, tf.constant(MATRIX.T), transpose_b=True)}

    m = quantized(opened(compute, VECTOR))
    blob = to_int8(m)
    assert len(weight_steps(blob)[0]) == 1
    assert compare_int8(m, blob, {"x": X}).most <= 1


@stores_columns
@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_columns_of_next_to_nothing_keep_their_bias(size):
    matrix = MATRIX.copy()
    matrix[:, 3] *= size
    m = quantized(dense(matrix, BIAS + 5.0))
    blob = to_int8(m)
    assert compare_int8(m, blob, {"x": X}).most <= 1


PARTLY = {
    "the first layer": {"scope": "a"},
    "the second layer": {"scope": "b"},
    "all but the first": {"overrides": {"a/dense": "skip"}},
    "all but the second": {"overrides": {"b/dense": "skip"}},
    "all but the last": {"overrides": {"c/dense": "skip"}},
}


@pytest.mark.parametrize(("product", "part"), crossed(PRODUCTS, PARTLY, together=1))
def test_a_part_of_a_network_of_dense_layers_is_quantized(product, part, caplog):
    """A product of batches in float is given data of 8 bits by the converter."""
    matrices = [normal(8, 6), normal(6, 5, seed=1), normal(5, 4, seed=2)]
    data = X if product == "matmul" else ROWS

    def compute(x):
        multiply = PRODUCTS[product]
        with tf.name_scope("a"):
            hidden = tf.nn.relu(multiply(x, matrices[0], "dense"))
        with tf.name_scope("b"):
            hidden = tf.sin(multiply(hidden, matrices[1], "dense"))
        with tf.name_scope("c"):
            return {"hidden": hidden, "y": multiply(hidden, matrices[2], "dense")}

    m = quantized(
        opened(compute, spec([None, *data.shape[1:]], "x")), data, **PARTLY[part]
    )
    blob = to_int8(m)
    assert {op.is_float for op in ops_of(blob) if op.kind == "FULLY_CONNECTED"}
    warned = any("not quantized in the model" in line for line in caplog.messages)
    assert warned == (part == "all but the first")
    if STORES_COLUMNS and not warned:
        assert compare_int8(m, blob, {"x": data}).most <= 3
