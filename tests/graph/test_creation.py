"""Ops that are made without a mark of what is around the caller."""

import pytest
import tensorflow as tf

import geutil as ge
from geutil.rewrite import constant_value, rewrite, rules


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
    z = graph.get_tensor_by_name("z:0")
    with graph.as_default():
        end = tf.exp(z)
    replaced = rewrite(graph, rules.constant_folding()).replaced
    assert constant_value(replaced[end]) == 1.0


def test_a_session_that_runs_within_an_undone_transaction_is_warned_of(graph, caplog):
    with graph.as_default():
        w = tf.constant(5.0, name="w")
    x, z = (graph.get_tensor_by_name(name) for name in ("x:0", "z:0"))
    session = tf.compat.v1.Session(graph=graph)
    with pytest.raises(KeyError), ge.transaction(graph):
        ge.reroute_ts(w, x)
        session.run(z)
        raise KeyError
    assert z.op.inputs[0] is x
    assert "a transaction is undone, but not for everybody" in caplog.text


def test_the_context_of_a_conditional(control_flow_v1):
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        tf.compat.v1.cond(x > 0, lambda: tf.exp(x), lambda: x)
        (old,) = ge.filter_ops(graph, ge.op_type("Exp"))
        rule = rules.swap_op("Exp", lambda t: t + tf.constant(2.0, name="two"))
        assert rewrite(graph, rule).replaced
    (new,) = (op for op in graph.get_operations() if op.name.endswith("two"))
    context = old._get_control_flow_context()
    assert context is not None
    assert new._get_control_flow_context() is context
    assert x.op._get_control_flow_context() is None
    # It runs when the branch is taken, and then only.
    assert new.control_inputs
