"""Folds are put in place at once: who reads what afterwards."""

import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm.applying import put_in_place
from geutil.graph.surroundings import count_ops, ops_since
from geutil.transform.rewrite.liveness import Liveness


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def replace(graph, build, kept=()):
    """Build what stands in for ops, and put it in place."""
    count = count_ops(graph)
    results = build()
    put_in_place(graph, results, ops_since(graph, count), {id(t) for t in kept})
    return results


def test_readers_move_and_old_ops_stay_as_they_are(graph):
    x = tf.constant([1.0], name="x")
    a = tf.negative(x, name="a")
    b = tf.exp(a, name="b")
    c = tf.sin(b, name="c")
    replace(graph, lambda: {b.op: tf.cos(x, name="new")})
    assert c.op.inputs[0].name == "new:0"
    assert [t.name for t in b.op.inputs] == ["a:0"]
    retired = [
        op.name for op in graph.get_operations() if Liveness(graph).is_retired(op)
    ]
    assert retired == ["a", "b"]
    ge.verify(graph)


def test_what_is_built_on_an_old_result_reads_the_new_one(graph):
    """Of two folds in a row, the second reads what the first yields."""
    x = tf.constant([1.0], name="x")
    a = tf.exp(x, name="a")
    b = tf.exp(a, name="b")
    y = tf.sin(b, name="y")

    def build():
        return {
            a.op: tf.cos(x, name="new_a"),
            b.op: tf.cos(a, name="new_b"),
        }

    replace(graph, build)
    assert y.op.inputs[0].name == "new_b:0"
    assert graph.get_operation_by_name("new_b").inputs[0].name == "new_a:0"
    assert b.op.inputs[0] is a


def test_what_somebody_else_reads_is_not_retired(graph):
    x = tf.constant([1.0], name="x")
    a = tf.negative(x, name="a")
    b = tf.exp(a, name="b")
    tf.sin(b, name="c")
    tf.sin(a, name="d")
    replace(graph, lambda: {b.op: tf.cos(x)})
    liveness = Liveness(graph)
    assert liveness.is_retired(b.op)
    assert not liveness.is_retired(a.op)


def test_kept_results_stay_and_are_not_retired(graph):
    x = tf.constant([1.0], name="x")
    a = tf.negative(x, name="a")
    b = tf.exp(a, name="b")
    c = tf.sin(b, name="c")
    replace(graph, lambda: {b.op: tf.cos(x, name="new")}, kept=[b])
    assert c.op.inputs[0].name == "new:0"
    liveness = Liveness(graph)
    assert not liveness.is_retired(a.op)
    assert not liveness.is_retired(b.op)


def test_who_waited_for_an_old_op_waits_for_the_new_one(graph):
    x = tf.constant([1.0], name="x")
    b = tf.exp(x, name="b")
    tf.sin(b, name="c")
    with tf.control_dependencies([b, x]):
        waiting = tf.constant(2.0, name="waiting")
    replace(graph, lambda: {b.op: tf.cos(x, name="new")})
    assert sorted(op.name for op in waiting.op.control_inputs) == ["new", "x"]


def test_a_cycle_is_refused_and_nothing_changes(graph):
    x = tf.constant([1.0], name="x")
    b = tf.exp(x, name="b")
    c = tf.sin(b, name="c")
    with pytest.raises(ge.CycleError):
        replace(graph, lambda: {b.op: tf.cos(c)})
    assert c.op.inputs[0] is b
