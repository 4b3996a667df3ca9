from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model import small_models

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def opened():
    function, w, b = small_models.affine()
    return model.open(function), function, w, b


def test_run_sees_edits(opened):
    m, *_ = opened
    assert m.run(x=X)["y"].shape == (2, 2)
    with m.graph.as_default():
        tripled = m.graph.get_tensor_by_name("hidden:0") * 3.0
    hidden = m.graph.get_tensor_by_name("hidden:0")
    ge.reroute_ts(tripled, hidden, cannot_modify=[tripled.op])
    np.testing.assert_array_equal(m.run(x=X)["y"], X * [6, 9] + [1, -1])


def test_run_sees_an_edit_that_was_taken_back(opened):
    m, function, *_ = opened
    with m.graph.as_default():
        other = m.inputs["x"] * 0.0
    with pytest.raises(KeyError), ge.transaction(m.graph):
        ge.reroute_ts(other, m.graph.get_tensor_by_name("hidden:0"))
        assert not (m.run(x=X)["y"] - [1, -1]).any()
        raise KeyError
    np.testing.assert_array_equal(m.run(x=X)["y"], function(X)["y"])


def test_outputs_follow_reroutes(opened):
    m, *_ = opened
    with m.graph.as_default():
        negated = tf.negative(m.outputs["y"])
    ge.reroute_ts(negated, m.outputs["y"], cannot_modify=[negated.op])
    assert m.outputs["y"] is negated
    np.testing.assert_array_equal(m.run(x=X)["y"], -(X * [2, 3] + [1, -1]))


def test_outputs_can_be_set_added_and_deleted(opened):
    m, *_ = opened
    m.outputs["hidden"] = m.graph.get_tensor_by_name("hidden:0")
    m.outputs["y"] = m.inputs["x"]
    result = m.run(x=X)
    np.testing.assert_array_equal(result["hidden"], X * [2, 3])
    np.testing.assert_array_equal(result["y"], X)
    del m.outputs["y"]
    assert list(m.run(x=X)) == ["hidden"]
    with pytest.raises(model.ModelError, match="only output"):
        del m.outputs["hidden"]


def test_an_output_may_change_its_dtype(opened):
    m, *_ = opened
    with m.graph.as_default():
        m.outputs["y"] = tf.argmax(m.outputs["y"], axis=1)
    assert m.run(x=X)["y"].dtype == np.int64


def test_an_output_of_another_graph_is_refused(opened):
    m, function, *_ = opened
    before = m.outputs["y"]
    with pytest.raises(model.ModelError, match="another graph"):
        m.outputs["y"] = model.open(function).inputs["x"]
    assert m.outputs["y"] is before


def test_a_new_variable_is_captured_and_saved(opened, tmp_path):
    m, *_ = opened
    scale = tf.Variable(10.0, name="scale")
    with m.graph.as_default():
        m.outputs["y"] = m.outputs["y"] * scale
    np.testing.assert_array_equal(m.run(x=X)["y"], (X * [2, 3] + [1, -1]) * 10)
    assert m.variables["scale"] is scale
    m.save(tmp_path / "m")
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    names = {v.name for v in loaded.variables}
    assert names == {"w:0", "b:0", "scale:0"}


def test_arguments_are_checked(opened):
    m, *_ = opened
    for arguments, message in (
        ({}, r"\['x'\] are missing"),
        ({"x": X, "z": X}, r"no input 'z'.*\['x'\]"),
        ({"x": [1.0, 2.0, 3.0]}, r"'x' is float32 of shape \(None, 2\)"),
        ({"x": [["a", "b"]]}, r"'x' is float32"),
    ):
        with pytest.raises(model.ModelError, match=message):
            m.run(**arguments)


def test_a_placeholder_that_nothing_feeds_is_named(opened):
    m, *_ = opened
    with m.graph.as_default():
        stray = tf.compat.v1.placeholder(tf.float32, [], "stray")
        m.outputs["y"] = m.outputs["y"] + stray
    with pytest.raises(model.ModelError, match=r"'stray' is no input.*'add"):
        m.run(x=X)


def test_ops_may_wait_for_inputs(opened):
    m, function, *_ = opened
    ge.add_control_inputs(m.graph.get_operation_by_name("sum"), m.inputs["x"].op)
    np.testing.assert_array_equal(m.run(x=X)["y"], function(X)["y"])
    ge.verify(m.graph)


def test_a_function_is_a_snapshot(opened):
    m, function, *_ = opened
    f = m.to_function()
    m.outputs["y"] = m.inputs["x"]
    np.testing.assert_array_equal(f(X)["y"], function(X)["y"])
    np.testing.assert_array_equal(m.to_function()(x=X)["y"], X)


def test_a_function_is_differentiable(opened):
    m, function, w, b = opened
    f = m.to_function()
    assert [id(v) for v in f.variables] == [id(w), id(b)]
    assert [id(v) for v in f.trainable_variables] == [id(w)]
    x = tf.constant(X)
    gradients = []
    for callable_ in (f, function, tf.function(f)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(callable_(x)["y"] ** 3)
        gradients.append(tape.gradient(loss, [x, w]))
    for found in (gradients[0], gradients[2]):
        for g, expected in zip(found, gradients[1], strict=True):
            np.testing.assert_array_equal(g, expected)


def test_a_function_checks_its_arguments(opened):
    f = opened[0].to_function()
    with pytest.raises(model.ModelError, match="2 values for 1 inputs"):
        f(X, X)
    with pytest.raises(model.ModelError, match="by position and by name"):
        f(X, x=X)


def test_side_effects_happen_once_per_call(tmp_path):
    count = tf.Variable(0, name="count")

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        count.assign_add(1)
        return {"y": x}

    m = model.open(function)
    m.run(x=1.0)
    assert int(count) == 1
    m.save(tmp_path / "m")
    again = model.open(tmp_path / "m")
    again.run(x=1.0)
    again.run(x=1.0)
    assert int(again.variables["count"]) == 3
    assert int(count) == 1


def test_tensor_arguments_in_graphs(opened):
    m, function, *_ = opened
    f = m.to_function()

    @tf.function
    def outer(x):
        return f(x=x * 2)["y"]

    np.testing.assert_array_equal(outer(tf.constant(X)), function(X * 2)["y"])


def test_repr_says_what_it_is(opened):
    assert repr(opened[0]) == "Model('serving_default', ['x'] -> ['y'], 7 ops)"
    assert repr(opened[0].signatures) == "Signatures(['serving_default'])"


def test_signatures_are_unknown_or_models(opened):
    m, *_ = opened
    assert m.signatures["serving_default"] is m
    with pytest.raises(KeyError):
        m.signatures["other"]
