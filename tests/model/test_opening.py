from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model import small_models

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def function():
    return small_models.affine()


def frozen_graph_def():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], "images/x")
        tf.nn.softmax(x * 3.0, name="scores")
    return graph


def test_a_function_with_a_signature(function):
    f, w, b = function
    m = model.open(f)
    assert list(m.inputs) == ["x"]
    assert list(m.outputs) == ["y"]
    assert m.signature == "serving_default"
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])
    assert m.variables["w"] is w
    assert m.variables["b"] is b
    assert not m.variables["b"].trainable
    ge.verify(m.graph)


def test_a_concrete_function_and_a_signature_name(function):
    f, *_ = function
    concrete = f.get_concrete_function()
    m = model.open(concrete, signature="predict")
    assert m.signature == "predict"
    assert list(m.signatures) == ["predict"]
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])


def test_positional_results_are_called_as_tensorflow_calls_them():
    f = tf.function(lambda a, b: (a + b, [a - b]))
    spec = tf.TensorSpec([2])
    m = model.open(f.get_concrete_function(spec, spec))
    assert list(m.inputs) == ["a", "b"]
    assert list(m.outputs) == ["output_0", "output_1"]
    result = m.run(a=[3.0, 4.0], b=[1.0, 2.0])
    np.testing.assert_array_equal(result["output_0"], [4.0, 6.0])
    np.testing.assert_array_equal(result["output_1"], [2.0, 2.0])


def test_outputs_keep_the_order_of_the_dictionary():
    f = tf.function(lambda x: {"z": x, "a": 2 * x}, [tf.TensorSpec([], name="x")])
    m = model.open(f)
    assert list(m.run(x=1.0).items()) == [("z", 1.0), ("a", 2.0)]


def test_names_in_a_file_of_version_1_are_counted(tmp_path):
    # The file holds maps, which each process reads in an order of its own.
    v1 = tf.compat.v1
    predict = v1.saved_model.signature_def_utils.predict_signature_def
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        inputs = {f"input_{i}": v1.placeholder(tf.float32, []) for i in range(12)}
        outputs = {f"output_{i}": 2.0 * t for i, t in enumerate(inputs.values())}
        builder = v1.saved_model.Builder(str(tmp_path / "counted"))
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": predict(inputs, outputs)}
        )
        builder.save()
    m = model.open(tmp_path / "counted")
    assert list(m.inputs) == list(inputs)
    assert list(m.outputs) == list(outputs)


def test_eager_execution_is_needed():
    with tf.Graph().as_default(), pytest.raises(model.ModelError, match="eager"):
        model.open(frozen_graph_def())


def test_colocation_that_is_no_text_is_forgotten():
    graph_def = frozen_graph_def().as_graph_def()
    graph_def.node[-1].attr["_class"].list.s.append(b"loc:@\xff")
    m = model.open(graph_def)
    assert list(m.outputs) == ["scores"]


def test_signatures_that_are_none_are_refused(tmp_path, monkeypatch):
    """As a damaged file may have them."""
    small_models.save_two_signatures(tmp_path / "m")
    loaded = tf.Module()
    monkeypatch.setattr(
        "geutil.model.files.loading.load_saved_model", lambda *_: loaded
    )
    for signatures in (object(), {"encode": object()}):
        loaded.signatures = signatures
        with pytest.raises(model.ModelError, match="the file is damaged"):
            model.open(tmp_path / "m", signature="encode")
