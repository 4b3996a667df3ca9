"""Ops that are made, one by one or in groups, without a mark of what is around."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import TransformError
from geutil.graph import verify
from geutil.graph.creation import Stencils
from geutil.rewrite import constant_value, rewrite, rules
from tests.settings import default_graph


@pytest.fixture
def chain():
    """A graph of a few ops, which is no default graph."""
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        y = tf.negative(x, name="y")
        with tf.control_dependencies([y]):
            tf.add(x, y, name="z")
    return graph


def test_graph_def_of_a_graph_too_large_for_one(chain, monkeypatch):
    def too_large(*_):
        raise ValueError("too large")

    monkeypatch.setattr(type(chain), "as_graph_def", too_large)
    z = chain.get_tensor_by_name("z:0")
    with chain.as_default():
        end = tf.exp(z)
    replaced = rewrite(chain, rules.constant_folding()).replaced
    assert constant_value(replaced[end]) == 1.0


def test_a_session_that_runs_within_an_undone_transaction_is_warned_of(chain, caplog):
    with chain.as_default():
        w = tf.constant(5.0, name="w")
    x, z = (chain.get_tensor_by_name(name) for name in ("x:0", "z:0"))
    session = tf.compat.v1.Session(graph=chain)
    with pytest.raises(KeyError), ge.transaction(chain):
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


def _product(x, y):
    with tf.control_dependencies([tf.negative(x, name="first")]):
        return [tf.multiply(x, y, name="product"), x - y]


def test_groups_compute_what_the_function_does(setting):
    def body():
        graph = default_graph()
        x, y = tf.constant([2.0, 3.0]), tf.constant([5.0, 7.0])
        stencils = Stencils(graph)
        first = stencils.add("product", _product, "a", [x, y])
        second = stencils.add("product", _product, "b", [y, x])
        third = stencils.add("product", _product, "c/d", [first[0], second[1]])
        made = stencils.make()
        verify(graph)
        results = [made[later] for later in (*first, *second, *third)]
        assert [t.name.partition("/")[0] for t in results] == [*"aabbcc"]
        (control,) = results[4].op.control_inputs
        assert control.name == "c/d/first"
        return results

    values = setting.run(body)
    expected = [[10, 21], [-3, -4], [10, 21], [3, 4], [30, 84], [7, 17]]
    np.testing.assert_array_equal(values, expected)


def test_a_kind_is_traced_once_for_a_dtype_and_rank():
    traced = []

    def double(x):
        traced.append((x.dtype.name, x.shape.rank))
        return [x + x]

    with tf.Graph().as_default() as graph:
        stencils = Stencils(graph)
        for index, value in enumerate((1.0, 2.0, [1.0], [2.0], 1, 2)):
            stencils.add("double", double, f"n{index}", [tf.constant(value)])
        stencils.make()
    assert traced == [("float32", 0), ("float32", 1), ("int32", 0)]


def test_ops_get_the_device_and_nothing_of_the_surroundings(graph):
    x = tf.constant(1.0)
    stencils = Stencils(graph)
    (placed,) = stencils.add("t", lambda t: [tf.tanh(t)], "a", [x], "/device:CPU:0")
    (free,) = stencils.add("t", lambda t: [tf.tanh(t)], "b", [x])
    with (
        tf.name_scope("scope"),
        tf.device("/device:CPU:1"),
        tf.control_dependencies([tf.constant(0.0)]),
    ):
        made = stencils.make()
    assert made[placed].op.device == "/device:CPU:0"
    assert made[free].op.device == ""
    assert made[free].op.name == "b/Tanh"
    assert not made[free].op.control_inputs
    verify(graph)


def test_a_name_in_use_is_refused(graph):
    x = tf.constant(1.0, name="a/Identity")
    stencils = Stencils(graph)
    stencils.add("same", lambda t: [tf.identity(t)], "a", [x])
    with pytest.raises(TransformError, match="'a/Identity' is in the graph already"):
        stencils.make()
