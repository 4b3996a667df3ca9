"""Data in every form that callers have, against the same batches by name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import ArgumentTypeError, ModelError
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.settings import needs_eager

pytestmark = needs_eager

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8)
MATRIX = RANDOM.normal(size=(3, 2)).astype(np.float32)


def single():
    spec = tf.TensorSpec([None, 3], name="x")
    return model.open(
        tf.function(lambda x: {"y": tf.matmul(x, MATRIX)}, input_signature=[spec])
    )


def double():
    specs = [tf.TensorSpec([None, 3], name=name) for name in ("a", "b")]
    return model.open(
        tf.function(lambda a, b: {"y": a - 2.0 * b}, input_signature=specs)
    )


def generator():
    yield X[:4]
    yield X[4:]


WHOLE = {
    "mapping": lambda: {"x": X},
    "array": lambda: X,
    "tensor": lambda: tf.constant(X),
    "lists": X.tolist,
    "with labels": lambda: (X, Y),
    "with weights": lambda: (X, Y, Y),
}
BATCHES = {
    "list of mappings": lambda: [{"x": X[:4]}, {"x": X[4:]}],
    "list of arrays": lambda: [X[:4], X[4:]],
    "generator": generator,
    "function": lambda: generator,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(X).batch(3),
    "dataset with labels": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(3),
    "dataset by name": lambda: tf.data.Dataset.from_tensor_slices({"x": X}).batch(4),
}


@pytest.mark.parametrize("form", {**WHOLE, **BATCHES})
def test_run_takes_every_form(form):
    m = single()
    found = m.run({**WHOLE, **BATCHES}[form]())["y"]
    np.testing.assert_allclose(found, X @ MATRIX, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", WHOLE)
def test_a_call_takes_every_form_of_one_batch(form):
    found = single()(WHOLE[form]())["y"]
    assert tf.is_tensor(found)
    np.testing.assert_allclose(found, X @ MATRIX, rtol=1e-5, atol=1e-6)


def test_a_call_takes_no_batches():
    with pytest.raises(ModelError, match="a call takes one batch"):
        single()([X[:4], X[4:]])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files(kind, tmp_path):
    if kind == "file":
        path = tmp_path / "x.npz"
        np.savez(path, x=X)
    else:
        path = tmp_path
        np.savez(path / "0.npz", x=X[:5])
        np.savez(path / "1.npz", x=X[5:])
    for given in (path, str(path)):
        found = single().run(given)["y"]
        np.testing.assert_allclose(found, X @ MATRIX, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "data",
    [
        {"a": X, "b": 2 * X},
        (X, 2 * X),
        ({"a": X, "b": 2 * X}, Y),
        ([X, 2 * X], Y),
        [[X, 2 * X]],
    ],
    ids=["mapping", "tuple", "mapping and labels", "list and labels", "list of lists"],
)
def test_networks_of_several_inputs(data):
    np.testing.assert_allclose(double().run(data)["y"], -3 * X, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"z": X}, ModelError, r"for the inputs \['z'\], and the model has \['x'\]"),
        ([], ModelError, "the dataset is empty"),
        (3.5j, ArgumentTypeError, "not builtins.complex"),
        ((X, Y, Y, Y), ModelError, "is a tuple of 4"),
        ("nowhere.npz", ModelError, "there is no data at 'nowhere.npz'"),
    ],
    ids=["name", "empty", "type", "tuple", "path"],
)
def test_what_is_no_data_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        single().run(data)


def test_data_is_given_once():
    with pytest.raises(ModelError, match="pass one or the other"):
        single().run(X, x=X)


def test_two_inputs_are_no_single_array():
    with pytest.raises((ModelError, ArgumentTypeError), match="'a', 'b'"):
        double().run(X)


@pytest.mark.parametrize("form", BATCHES)
def test_calibration_and_comparison_take_the_same(form):
    def quantized(data):
        m = single()
        quantize(m, is_training=False)
        return m, calibrate(m, data, "min_max", progress=False)

    m, report = quantized(BATCHES[form]())
    _, expected = quantized([{"x": X}])
    for name, ends in expected.ranges.items():
        np.testing.assert_array_equal(report.ranges[name], ends)
    comparison = compare_int8(m, to_int8(m), BATCHES[form]())
    assert comparison.most <= 1
