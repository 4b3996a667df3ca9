"""Functions that the ops of a graph call, opened, edited and written back."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.bodies import OpenedFunctions
from geutil.gradients import explain, gradients, last_report
from geutil.graph import transaction
from tests.settings import evaluate, needs_eager

pytestmark = needs_eager

X = np.float32([1.0, 2.0, 3.0])


def doubled(x):
    return tf.multiply(x, 2.0, name="product")


def calling_graph(build):
    """Return a graph that calls functions, its input and its result."""
    spec = tf.TensorSpec([3], name="x")
    traced = tf.function(build, input_signature=[spec], autograph=False)
    graph_def = traced.get_concrete_function().graph.as_graph_def()
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    results = [op for op in graph.get_operations() if op.type == "Identity"]
    (y,) = [op.outputs[0] for op in results if not op.outputs[0].consumers()]
    return graph, y


def value(graph, y):
    return evaluate(graph, [y], {"x:0": X})[0]


def branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: doubled(x), lambda: x) + 1.0


def loop(x):
    return tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, doubled(y)), [0, x])[
        1
    ]


def edit(functions):
    """Make the product one by 5, in whatever functions it is."""
    edited = []
    for function in functions.opened:
        for op in function.graph.get_operations():
            if op.name.rpartition("/")[2] == "product":
                with function.graph.as_default():
                    ge.reroute_ts(tf.constant(5.0), op.inputs[1], can_modify=[op])
                edited.append(function)
    assert edited
    return edited


def test_calls_that_are_changed_halfway_are_put_back(monkeypatch):
    graph, y = calling_graph(branch)
    (cond,) = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    before = cond.node_def
    functions = OpenedFunctions(graph)
    edited = edit(functions)
    original = tf.Operation._set_attr
    calls = []

    def failing(self, name, value):
        calls.append(name)
        if len(calls) == 2:
            raise KeyError(name)
        original(self, name, value)

    with pytest.raises(KeyError), transaction(graph):
        monkeypatch.setattr(tf.Operation, "_set_attr", failing)
        functions.write_back(edited)
    assert cond.node_def == before
    np.testing.assert_allclose(value(graph, y), 2 * X + 1)


def test_the_loop_of_a_backward_pass_is_opened():
    # Arguments of its body are colocated with the loop of the forward pass.
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [3], name="x")
        tf.gradients(loop(tf.square(x)), x)
    opened = OpenedFunctions(graph)
    assert [u.reason for u in opened.unopened] == []
    assert sum("grad" in function.name for function in opened.opened) == 2


def read_in_loop():
    """Return a function's graph whose loop reads a variable, and its handle there."""
    weight = tf.Variable(np.eye(3, dtype="f"))

    @tf.function(input_signature=[tf.TensorSpec([2, 3])], autograph=False)
    def traced(x):
        def turn(i, y):
            return i + 1, tf.tanh(tf.matmul(y, weight))

        return tf.while_loop(lambda i, _: i < 4, turn, [0, x])[1]

    graph = traced.get_concrete_function().graph
    return graph, graph.capture(weight.handle), weight


def test_copies_are_differentiated_by_variables_that_loops_read():
    graph, handle, _variable = read_in_loop()
    with tf.Graph().as_default() as other:
        _, info = ge.copy(graph, other)
        y = info.transformed(graph.outputs[0])
        (slope,) = tf.gradients(y, info.transformed(handle))
    assert slope is not None
    assert slope.shape == [3, 3]


def test_copied_loops_are_differentiated_with_the_shapes_of_lists():
    """A plan differentiates a copy, whose step is that of the graph itself."""
    reports = []
    for tell in (explain, gradients):
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [2, 5, 3])
            y = tf.keras.layers.LSTM(4, return_sequences=True)(x)
            told = tell(y, x, checkpoints=None)
            reports.append(told if tell is explain else last_report())
    copied, own = reports
    assert copied.plain_peak == own.plain_peak
    assert copied.forward_cost == own.forward_cost
