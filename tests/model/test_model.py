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


def test_an_output_may_change_its_dtype(opened):
    m, *_ = opened
    with m.graph.as_default():
        m.outputs["y"] = tf.argmax(m.outputs["y"], axis=1)
    assert m.run(x=X)["y"].dtype == np.int64


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


def test_repr_says_what_it_is(opened):
    m, *_ = opened
    assert repr(m) == "Model('serving_default', ['x'] -> ['y'], 7 ops)"
    assert repr(m.signatures) == "Signatures(['serving_default'])"
    assert m.signatures["serving_default"] is m
    with pytest.raises(KeyError):
        m.signatures["other"]
