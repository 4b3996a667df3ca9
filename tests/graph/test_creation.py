"""Ops that are made without a mark of what is around the caller."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph import creation
from geutil.graph.adjacency import control_flow_context
from geutil.graph.creation import context_name, surroundings_of
from geutil.graph.state import count_ops, ops_since


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        y = tf.negative(x, name="y")
        with tf.control_dependencies([y]):
            tf.add(x, y, name="z")
    return graph


def test_graph_def_of_a_graph_too_large_for_one(graph, monkeypatch):
    def too_large(*_):
        raise ValueError("too large")

    monkeypatch.setattr(type(graph), "as_graph_def", too_large)
    ops = graph.get_operations()
    graph_def = creation.graph_def_of(graph, ops)
    assert [node.name for node in graph_def.node] == ["x", "y", "z"]


def test_a_session_that_runs_within_an_undone_transaction_is_warned_of(graph, caplog):
    count = count_ops(graph)
    assert count == len(graph.get_operations())
    assert ops_since(graph, count) == []
    with graph.as_default():
        w = tf.constant(5.0, name="w")
    assert ops_since(graph, count) == [w.op]
    x, z = (graph.get_tensor_by_name(name) for name in ("x:0", "z:0"))
    session = tf.compat.v1.Session(graph=graph)
    with pytest.raises(KeyError), ge.transaction(graph):
        ge.reroute_ts(w, x)
        session.run(z)
        raise KeyError
    assert z.op.inputs[0] is x
    assert "a transaction is undone, but not for everybody" in caplog.text


def test_a_call_of_an_op_on_other_inputs_has_its_attributes():
    with tf.Graph().as_default():
        x = tf.ones([2, 3])
        product = tf.matmul(x, x, transpose_b=True).op
        joined = tf.concat([x, x, x], 1).op
        total = tf.reduce_sum(x, 1, keepdims=True).op
    two = tf.constant([[1.0, 2.0]])
    assert creation.raw_call(product, [two, two])().numpy().tolist() == [[5.0]]
    parts = [two, two, two, tf.constant(0)]
    assert creation.raw_call(joined, parts)().shape == [3, 2]
    assert creation.raw_call(total, [two, tf.constant(1)])().numpy().tolist() == [[3.0]]
    unknown = SimpleNamespace(type="NoSuchOp")
    assert creation.raw_call(unknown, []) is None


def test_the_context_of_a_conditional(control_flow_v1):
    inside = []
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)

        def branch():
            inside.append(tf.exp(x))
            return inside[0]

        tf.compat.v1.cond(x > 0, branch, lambda: x)
    with surroundings_of(inside[0].op):
        new = tf.constant(2.0)
    assert control_flow_context(new.op) is control_flow_context(inside[0].op)
    assert context_name(new.op) == context_name(inside[0].op) is not None
    assert context_name(x.op) is None
    assert new.op.control_inputs
    assert graph is new.graph
