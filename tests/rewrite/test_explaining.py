from types import SimpleNamespace

import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.rewrite import Any, Const, Op, Or, Rule, explain, rewrite
from tests.graph.building import snapshot
from tests.select import tables


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        c = tf.constant([1.0, 2.0], name="c")
        s = tf.sin(x, name="s")
        tf.exp(tf.add(s, c, name="a"), name="e")
        tf.cos(s, name="other")
        tf.exp(tf.split(x, 2, name="split")[1], name="part")
        yield graph


# A pattern at the op `e`: the node that did not match, the element and the reason.
MISSES = """
Op('Tanh') => Op('Tanh') | e | its type is Exp, not Tanh
Op('Exp', Op({'Sub', 'Mul'})) => Op('Mul|Sub') | a | its type is AddV2, not Mul|Sub
Op('Exp', Op('AddV2', Any('x'), Any('x')))
    => Any('x') | c | 'x' names 's:0' already
Op('Exp', Op('AddV2', Op('Sin'))) => Op('AddV2') | a | it has 2 inputs, not 1
Op('Exp', Op('AddV2', Op('Sin', Const('k')), Any()))
    => Const('k') | x | it comes from Placeholder, not a constant
Op('Exp', Op('AddV2', Op('Sin', only_consumer=True), Any()))
    => Op('Sin') | s | only_consumer: 'other' reads 's' too
Op('Exp', attrs={'T': tf.float16}, name='exp')
    => Op('Exp', name='exp') | e | attribute 'T' is not tf.float16
Op('Exp', where=is_large) => Op('Exp') | e | is_large() is false
"""


def is_large(op):
    return False


def test_the_nearest_miss(graph):
    before = snapshot(graph)
    op = graph.get_operation_by_name("e")
    nodes = {"Op": Op, "Any": Any, "Const": Const, "is_large": is_large}
    sample = SimpleNamespace(graph=graph, tf=tf, **nodes)

    def check(call, result):
        explanation = explain(graph, tables.evaluate(call, sample), op)
        assert explanation.match is None
        assert explanation.root is op
        # An op's node may be told of with the op or with its output.
        element = explanation.element.removesuffix(":0")
        found = " | ".join([explanation.node, element, explanation.reason])
        assert found == result, found
        assert explanation.reason in str(explanation)

    tables.check_rows(MISSES, check)
    part = graph.get_operation_by_name("part")
    assert (
        explain(graph, Op("Exp", Op("Split")), part).reason == "it is output 1, not 0"
    )
    explanation = explain(graph, Op("Exp", Any("a")), op)
    assert explanation.match["a"].name == "a:0"
    assert str(explanation) == "'e' matches with 1 op(s)"
    assert snapshot(graph) == before
    rewrite(graph, Rule(Op("Sin", Any("x")), lambda m: tf.tanh(m["x"])))
    explanation = explain(graph, Op("Sin"), graph.get_operation_by_name("s"))
    assert "a rewrite replaced it" in explanation.reason


def test_of_several_ways_the_one_that_came_furthest(graph):
    far = Op("Exp", Op("AddV2", Op("Sin", Op("Tanh")), Any()))
    near = Op("Exp", Op("Mul"))
    for pattern in (Or(far, near), Or(near, far)):
        explanation = explain(graph, pattern, graph.get_operation_by_name("e"))
        assert explanation.node == "Op('Tanh')"
        assert explanation.reached == (
            ("Op('Exp')", "e"),
            ("Op('AddV2')", "a"),
            ("Op('Sin')", "s"),
        )


def test_wrong_arguments(graph):
    op = graph.get_operation_by_name("e")
    with pytest.raises(ArgumentTypeError):
        explain("graph", Op("Exp"), op)
    with pytest.raises(ArgumentTypeError):
        explain(graph, Op("Exp"), op.outputs[0])
    with pytest.raises(ArgumentTypeError):
        explain(graph, "Exp", op)
    with pytest.raises(SelectionError):
        explain(tf.Graph(), Op("Exp"), op)
