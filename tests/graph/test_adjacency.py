import random

import tensorflow as tf

from geutil.graph import adjacency
from tests import settings
from tests.graph import building


def fan_out(readers):
    """Return a tensor and its readers, in the order in which they were made."""
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        ops = [tf.add(x, x, name=f"r{i}").op for i in range(readers)]
    return x, ops


def test_consumers_are_in_graph_order_each_once():
    for readers in (0, 1, 2, 8, 9, 20, 100):
        x, ops = fan_out(readers)
        assert settings.names(adjacency.consumers(x)) == settings.names(ops)


def test_consumers_of_one_output_only():
    with tf.Graph().as_default():
        first, second = tf.split(tf.zeros([4]), 2)
        a, b = tf.negative(first), tf.negative(second)
    assert adjacency.consumers(first) == [a.op]
    assert adjacency.consumers(second) == [b.op]


def test_consumers_after_rewiring_are_in_graph_order():
    x, ops = fan_out(30)
    with x.graph.as_default():
        y = tf.constant(2.0)
    order = list(range(30))
    random.Random(0).shuffle(order)
    for i in order:
        ops[i]._update_input(0, y)
    assert settings.names(adjacency.consumers(y)) == settings.names(ops)


def test_control_outputs_are_in_graph_order():
    with tf.Graph().as_default():
        x = tf.constant(1.0)
        none = tf.constant(2.0)
        with tf.control_dependencies([x]):
            ops = [tf.constant(float(i)).op for i in range(25)]
        tf.negative(x)
    # The list is one's own.
    adjacency.control_outputs(x.op).clear()
    assert adjacency.control_outputs(x.op) == ops
    assert adjacency.control_outputs(none.op) == []
    assert adjacency.control_outputs(ops[0]) == []


def test_back_edges_of_a_loop(loops):
    back = {
        (producer.name, op.name)
        for op in loops.graph.get_operations()
        for producer in (t.op for t in op.inputs)
        if adjacency.is_back_edge(producer, op)
    }
    # Two loop variables in each loop; the second input of a Merge comes around.
    expected = {
        (op.inputs[1].op.name, op.name)
        for op in loops.graph.get_operations()
        if op.type == "Merge"
    }
    assert len(expected) == 4
    assert back == expected


def test_neighbours_leave_back_edges_out(loops):
    expected = sorted(
        (producer, consumer)
        for producer, consumer in building.op_edges(loops.graph)
        if "NextIteration" not in producer
    )
    ops = loops.graph.get_operations()
    backward = [(p.name, op.name) for op in ops for p in adjacency.predecessors(op)]
    forward = [(op.name, s.name) for op in ops for s in adjacency.successors(op)]
    assert sorted(backward) == expected
    assert sorted(forward) == expected


def test_neighbours_are_there_once_for_each_edge():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        y = tf.add(x, x, name="y")
    y.op._add_control_input(x.op)
    assert settings.names(adjacency.predecessors(y.op)) == ["x", "x", "x"]
    assert settings.names(adjacency.successors(x.op)) == ["y", "y", "y"]


def test_graph_order():
    _, ops = fan_out(15)
    shuffled = random.Random(0).sample(ops, len(ops))
    assert adjacency.graph_order(shuffled) == ops


def test_input_indices(setting):
    def body():
        graph = settings.default_graph()
        x, y = tf.constant(1.0), tf.constant(2.0)
        op = tf.add_n([x, y, x]).op
        count = len(graph.get_operations())
        assert adjacency.input_indices(op, x) == [0, 2]
        assert adjacency.input_indices(op, y) == [1]
        assert adjacency.input_indices(op, op.outputs[0]) == []
        assert len(graph.get_operations()) == count

    setting.run(body)


def test_takes_reference():
    with tf.Graph().as_default():
        variable = tf.compat.v1.Variable(1.0, use_resource=False)
        assign = tf.compat.v1.assign(variable, 2.0).op
    assert assign.type == "Assign"
    assert adjacency.takes_reference(assign, 0)
    assert not adjacency.takes_reference(assign, 1)


def test_control_flow_context(loops):
    assert adjacency.control_flow_context(loops.x.op) is None
    assert adjacency.control_flow_context(loops.inside1.op).name.startswith("loop1/")
