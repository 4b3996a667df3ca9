"""Gradients of calls in graphs that were made from protobufs."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model.body_samples import gradients

X = np.array([0.3, -0.7], np.float32)
SPEC = tf.TensorSpec([2], name="x")


@tf.function(autograph=False)
def loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.sin(y)), [0, x])[1]


@tf.function(autograph=False)
def call_of_loop(x):
    return loop(x) * 2.0


@tf.function(autograph=False)
def loop_of_calls(x):
    body = lambda i, y: (i + 1, call_of_loop(y))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]


@pytest.mark.parametrize("function", [loop, call_of_loop, loop_of_calls])
def test_loops_in_calls_in_loops(function):
    """TensorFlow's own gradient of an imported call knows no loops."""

    @tf.function(input_signature=[SPEC])
    def outer(x):
        return {"y": function(x) + function(x * 2.0)}

    m = model.open(outer, inline=False)
    first, *others = (
        gradients(lambda x, f=f: f(x)["y"], X)[0]
        for f in (outer, m.to_function(), tf.function(m.to_function()))
    )
    for slope in others:
        np.testing.assert_allclose(slope, first, rtol=1e-6)


def test_a_graph_of_somebody_else_has_the_gradient_that_it_had():
    concrete = tf.function(lambda x: tf.sin(x) * 3.0).get_concrete_function(SPEC)
    with tf.Graph().as_default() as source:
        x = tf.compat.v1.placeholder(tf.float32, [2], "x")
        tf.identity(concrete(x), name="y")
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(source.as_graph_def(), name="")
        x, y = (graph.get_tensor_by_name(name) for name in ("x:0", "y:0"))
        (slope,) = tf.gradients(y, x)
        assert "SymbolicGradient" in {op.type for op in graph.get_operations()}
        with tf.compat.v1.Session() as session:
            got = session.run(slope, {x: X})
    np.testing.assert_allclose(got, 3 * np.cos(X), rtol=1e-6)
