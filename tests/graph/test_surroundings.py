import pytest
import tensorflow as tf

from geutil.graph.adjacency import control_flow_context
from geutil.graph.creation import context_name, surroundings_of
from geutil.graph.state import count_ops, ops_since
from tests.settings import names


@pytest.mark.parametrize("scope", ["", "a", "a/b"])
@pytest.mark.parametrize("device", ["", "/device:CPU:0"])
def test_new_ops_are_like_the_op(scope, device):
    with tf.Graph().as_default() as graph:
        first, other = tf.no_op("first"), tf.no_op("other")
        with graph.name_scope(scope or None), tf.device(device or None):
            old = tf.constant(1.0, name="old")
        with (
            tf.name_scope("elsewhere"),
            tf.device("/device:GPU:3"),
            tf.control_dependencies([other]),
            surroundings_of(old.op, [first]),
        ):
            new = tf.constant(2.0, name="new")
    assert new.graph is graph
    assert new.op.name == f"{scope}/new".lstrip("/")
    assert new.op.device == old.op.device
    assert names(new.op.control_inputs) == ["first"]


def test_the_context_of_a_conditional(request):
    tf.compat.v1.disable_control_flow_v2()
    request.addfinalizer(tf.compat.v1.enable_control_flow_v2)
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


def test_what_was_made_since():
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
        count = count_ops(graph)
        assert count == len(graph.get_operations())
        assert ops_since(graph, count) == []
        new = tf.constant(2.0), tf.constant(3.0)
    assert ops_since(graph, count) == [t.op for t in new]
