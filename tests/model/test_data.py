"""Data in every form that callers have, against the same batches by name."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import ArgumentTypeError, ModelError
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.model.refusal_tables import not_refused
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


def near(found, expected, name):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=str(name))


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


def test_run_takes_every_form_and_a_call_every_form_of_one_batch():
    m = single()
    for name, form in {**WHOLE, **BATCHES}.items():
        near(m.run(form())["y"], X @ MATRIX, name)
        if name in WHOLE:
            found = m(form())["y"]
            assert tf.is_tensor(found)
            near(found, X @ MATRIX, name)
    with pytest.raises(ModelError, match="a call takes one batch"):
        m([X[:4], X[4:]])


def test_files(tmp_path):
    np.savez(tmp_path / "x.npz", x=X)
    folder = tmp_path / "folder"
    folder.mkdir()
    np.savez(folder / "0.npz", x=X[:5])
    np.savez(folder / "1.npz", x=X[5:])
    m = single()
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "named.npz", anything=X)
    single_files = [tmp_path / name for name in ("x.npz", "x.npy", "named.npz")]
    for path in (*single_files, folder, str(folder)):
        near(m.run(path)["y"], X @ MATRIX, path)


def test_networks_of_several_inputs():
    m = double()
    for name, data in {
        "mapping": {"a": X, "b": 2 * X},
        "tuple": (X, 2 * X),
        "mapping and labels": ({"a": X, "b": 2 * X}, Y),
        "list and labels": ([X, 2 * X], Y),
        "list of lists": [[X, 2 * X]],
    }.items():
        near(m.run(data)["y"], -3 * X, name)
    with pytest.raises((ModelError, ArgumentTypeError), match="'a', 'b'"):
        m.run(X)


def test_what_is_no_data_is_refused():
    run = single().run
    cases = [
        (message, partial(run, data), message)
        for data, message in (
            ({"z": X}, r"for the inputs \['z'\], and the model has \['x'\]"),
            ([], "the dataset is empty"),
            ((X, Y, Y, Y), "is a tuple of 4"),
            ("nowhere.npz", "there is no data at 'nowhere.npz'"),
        )
    ]
    cases.append(("twice", partial(run, X, x=X), "pass one or the other"))
    assert not_refused(ModelError, cases) == {}
    with pytest.raises(ArgumentTypeError, match=r"not builtins\.complex"):
        run(3.5j)


def test_calibration_and_comparison_take_the_same():
    m = single()
    quantize(m, is_training=False)
    expected = calibrate(m, [{"x": X}], "min_max", progress=False)
    blob = to_int8(m)
    for name, form in BATCHES.items():
        report = calibrate(m, form(), "min_max", progress=False)
        assert report.ranges.keys() == expected.ranges.keys()
        for tensor, ends in expected.ranges.items():
            np.testing.assert_array_equal(report.ranges[tensor], ends, err_msg=name)
        assert compare_int8(m, blob, form()).most <= 1, name


def test_images_that_are_not_scaled_are_told(caplog):
    m = single()
    quantize(m, is_training=False)
    levels = np.arange(1, 256, dtype=np.uint8).reshape(85, 3)
    (seen,) = calibrate(m, levels, "min_max", progress=False).inputs
    assert (seen.given, seen.seen, seen.low, seen.high) == ("uint8", "float32", 1, 255)
    assert seen.mean == 128
    assert "trained on scaled ones" in str(seen)
    assert "given uint8: 0 to 255 is used as it is" in caplog.text
    scaled = calibrate(m, levels / np.float32(255), "min_max", progress=False)
    assert not scaled.inputs[0].doubt
    assert "to 1, mean 0.502; the network saw float32" in str(scaled)
