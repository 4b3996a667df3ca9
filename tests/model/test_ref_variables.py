import pytest
import tensorflow as tf

from geutil import model

v1 = tf.compat.v1


def ref_variable(value, name):
    return v1.get_variable(
        name, initializer=tf.constant(value), use_resource=False, dtype=tf.float32
    )


def test_values_are_read_where_they_were():
    # A Session returns 13 for `before` too: it hands out the buffer that is updated
    # later. Resource variables do not, so the value is that of the read's time.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        w = ref_variable(10.0, "w")
        before = tf.identity(w.read_value(), name="before")
        with tf.control_dependencies([before]):
            updated = v1.assign_add(w, x, name="update")
        tf.multiply(updated, 2.0, name="doubled")
    m = model.open(graph.as_graph_def(), outputs=["before", "doubled"])
    m.variables["w"].assign(10.0)
    found = m.run(x=3.0)
    assert [float(found["before"]), float(found["doubled"])] == [10.0, 26.0]
    assert float(m.variables["w"]) == 13.0


def test_nodes_may_come_in_any_order():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        w = ref_variable(1.0, "w")
        first = v1.assign(w, x)
        second = v1.assign_add(first, 2.0)
        third = v1.assign_sub(second, 0.5)
        tf.identity(third * 2.0, name="y")
    graph_def = graph.as_graph_def()
    turned = v1.GraphDef(versions=graph_def.versions, node=graph_def.node[::-1])
    before = turned.SerializeToString(deterministic=True)
    m = model.open(turned, outputs=["y"])
    assert turned.SerializeToString(deterministic=True) == before
    m.variables["w"].assign(0.0)
    assert float(m.run(x=3.0)["y"]) == 9.0
    assert float(m.variables["w"]) == 4.5


def test_an_update_without_a_twin_is_refused():
    with tf.Graph().as_default() as graph:
        w = ref_variable([1.0, 2.0], "w")
        v1.scatter_update(w, [0], [5.0], name="scatter")
    with pytest.raises(model.ModelError, match=r"'scatter' \(ScatterUpdate\).*'w'"):
        model.open(graph.as_graph_def())
