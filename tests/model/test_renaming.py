from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model import small_models
from tests.model.refusal_tables import not_refused

X = np.array([[1.0, 2.0]], np.float32)


@pytest.fixture
def opened():
    function, w, b = small_models.affine()
    m = model.open(function)
    ge.add_control_inputs(m.graph.get_operation_by_name("sum"), m.inputs["x"].op)
    m.keep = (w, b)
    m.outputs["hidden"] = m.graph.get_tensor_by_name("hidden:0")
    return m


def test_all_names_change(opened, tmp_path):
    renamed = opened.rename({"x": "images"}, {"y": "scores"}, "predict")
    assert list(renamed.inputs) == ["images"]
    assert list(renamed.outputs) == ["scores", "hidden"]
    (image,) = renamed.graph.get_operation_by_name("sum").control_inputs
    assert renamed.inputs["images"].op.name == image.name == "images"
    expected = opened.run(x=X)
    np.testing.assert_array_equal(renamed.run(images=X)["scores"], expected["y"])
    renamed.save(tmp_path / "m")
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    assert list(loaded.signatures) == ["predict"]
    result = loaded.signatures["predict"](images=tf.constant(X))
    np.testing.assert_array_equal(result["scores"], expected["y"])


def test_names_can_be_swapped(opened):
    renamed = opened.rename({"x": "x"}, {"y": "hidden", "hidden": "y"})
    np.testing.assert_array_equal(renamed.run(x=X)["y"], opened.run(x=X)["hidden"])


def test_the_model_keeps_its_names(opened):
    opened.rename({"x": "images"}, signature="predict")
    assert list(opened.inputs) == ["x"]
    assert opened.signature == "serving_default"
    assert list(opened.signatures) == ["serving_default"]


def test_other_signatures_stay(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    m = model.open(tmp_path / "m", signature="encode")
    with pytest.raises(model.ModelError, match=r"a signature 'decode' already"):
        m.rename(signature="decode")
    m = m.rename(signature="shrink")
    assert sorted(m.signatures) == ["decode", "shrink"]
    m.save(tmp_path / "out")
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    assert sorted(loaded.signatures) == ["decode", "shrink"]


def test_refusals(opened):
    table = (
        ({"inputs": {"z": "a"}}, r"no input 'z'; there are \['x'\]"),
        ({"outputs": {"z": "a"}}, r"no output 'z'"),
        ({"outputs": {"y": "hidden"}}, r"two outputs would be called \['hidden'\]"),
        ({"inputs": {"x": ""}}, r"input 'x' needs a name"),
        ({"signature": ""}, r"needs a name"),
    )
    cases = [(said, partial(opened.rename, **ends), said) for ends, said in table]
    assert not_refused(model.ModelError, cases, unchanged=opened) == {}
