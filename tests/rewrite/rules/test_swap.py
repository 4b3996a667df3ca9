import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.rewrite import Any, Const, Op, Optional, rewrite
from geutil.rewrite.rules import swap_op
from tests.graph.building import snapshot
from tests.settings import default_graph, edges, evaluate


def test_an_op_by_its_type(setting):
    def body():
        x = tf.constant([0.25, -1.5])
        y = tf.negative(tf.nn.relu(x))
        report = rewrite(default_graph(), swap_op("Relu", tf.abs), debug=True)
        assert list(report.counts) == ["abs"]
        return [y]

    assert setting.run(body)[0].tolist() == [-0.25, -1.5]


def test_an_op_by_several_types_or_a_predicate():
    with tf.Graph().as_default() as graph:
        x = tf.constant([0.25, -1.5])
        y = tf.negative(tf.nn.relu(x)) + tf.negative(tf.nn.elu(x, name="special"))
    rewrite(graph, swap_op({"Relu", "Tanh"}, tf.abs))
    rewrite(graph, swap_op(lambda op: op.name == "special", tf.square))
    np.testing.assert_allclose(
        evaluate(graph, [y])[0], -(np.abs([0.25, -1.5]) + np.square([0.25, -1.5]))
    )


def test_captures_come_by_keyword_and_missing_ones_are_none():
    def build(x, bias, relu):
        seen.append(bias is not None)
        assert relu.type == "Relu"
        return x if bias is None else x + 2 * bias

    seen = []
    x = Any("x")
    pattern = Op("Relu", Optional(Op("BiasAdd", x, Const("bias"))), name="relu")
    with tf.Graph().as_default() as graph:
        start = tf.constant([[1.0, -2.0]])
        y = tf.negative(tf.nn.relu(tf.nn.bias_add(start, [1.0, 1.0])))
        z = tf.negative(tf.nn.relu(start))
    rewrite(graph, swap_op(pattern, build), debug=True)
    assert sorted(seen) == [False, True]
    values = evaluate(graph, [y, z])
    assert [v.tolist() for v in values] == [[[-3.0, 0.0]], [[-1.0, 2.0]]]


def test_several_outputs():
    with tf.Graph().as_default() as graph:
        a, b = tf.split(tf.constant([1.0, 2.0]), 2)
        y = a - b
    rewrite(graph, swap_op("Split", lambda axis, x: (x[1:], x[:1])), debug=True)
    assert evaluate(graph, [y])[0].tolist() == [1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: tf.cast(x, tf.int32), "dtypes differ"),
        (lambda x: x[:1], "shapes differ"),
        (lambda x: [x, x], "returned 2 tensor(s) for 1 output(s)"),
        (lambda x: 1.0, "not a tensor of the same graph"),
        (lambda x: x.op, "return its output"),
        (lambda x: tf.Graph(), "not a tensor"),
    ],
)
def test_what_cannot_stand_in_is_refused(function, words):
    with tf.Graph().as_default() as graph:
        tf.negative(tf.nn.relu(tf.constant([1.0, 2.0])))
    before = edges(graph)
    with pytest.raises(TransformError) as caught:
        rewrite(graph, swap_op("Relu", function, name="swap"))
    assert words in str(caught.value)
    assert "'swap' at 'Relu'" in str(caught.value)
    after = edges(graph)
    assert {name: after[name] for name in before} == before


def test_no_function():
    with tf.Graph().as_default() as graph:
        tf.nn.relu(tf.constant([1.0]))
    before = snapshot(graph)
    with pytest.raises(ArgumentTypeError):
        swap_op("Relu", tf.abs, check=3)
    assert snapshot(graph) == before
