"""Variable objects of version 1 graphs go along to another graph."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.settings import evaluate

v1 = tf.compat.v1


@pytest.fixture(params=[True, False], ids=["resource", "reference"])
def model(request):
    with tf.Graph().as_default():
        w = v1.get_variable(
            "w",
            [2],
            initializer=v1.constant_initializer([1.0, 2.0]),
            use_resource=request.param,
        )
        frozen = v1.get_variable(
            "frozen", initializer=3.0, use_resource=request.param, trainable=False
        )
        v1.add_to_collection("mine", w)
        x = v1.placeholder(tf.float32, [2], name="x")
        y = tf.multiply(w, x) + frozen
    return x, y


def test_initializers_collections_and_gradients(model):
    x, y = model
    # Within one graph the variables are shared.
    before = x.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
    with x.graph.as_default():
        within = ge.graph_replace(y, {x.ref(): tf.constant([1.0, 1.0])})
    assert x.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES) == before
    np.testing.assert_allclose(evaluate(x.graph, [within])[0], [4.0, 5.0])
    graph = tf.Graph()
    _, info = ge.copy(x.graph, graph, dst_scope="c")
    x_, y_ = info.transformed([x, y])
    with graph.as_default():
        assert [v.name for v in v1.global_variables()] == ["c/w:0", "c/frozen:0"]
        (w_,) = v1.trainable_variables()
        assert graph.get_collection("c/mine") == [w_]
        gradient = tf.gradients(y_, w_)[0]
        v1.train.Saver()
    value, slope = evaluate(graph, [y_, gradient], {x_: [3.0, 4.0]})
    np.testing.assert_allclose(value, [6.0, 11.0])
    np.testing.assert_allclose(slope, [3.0, 4.0])


def test_a_variable_without_its_initializer_is_named_in_a_warning(model, caplog):
    x, y = model
    graph = tf.Graph()
    with caplog.at_level(logging.WARNING, "geutil"):
        ge.copy(ge.get_backward_walk_ops(y), graph)
    assert "variable 'w:0' is copied without a tf.Variable object" in caplog.text
    assert "'w/Assign' is not among the copied ops" in caplog.text
    assert graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES) == []
