import networkx
import pytest
import tensorflow as tf

import geutil as ge
from geutil import report
from geutil.errors import ArgumentTypeError
from geutil.reroute import reroute_ts
from tests.report import samples


def drawn(subject, index=0):
    return report.view(subject).payload["graphs"][index]


def read_by(data, place):
    """Return the names of what an op reads, from the columns."""
    flat = data["inputs"][place]
    return [
        f"{data['names'][op]}:{output}"
        for op, output in zip(flat[::2], flat[1::2], strict=True)
    ]


def check_columns(data, graph, without=()):
    ops = [op for op in graph.get_operations() if op.name not in without]
    assert data["names"] == [op.name for op in ops]
    assert [data["typeNames"][t] for t in data["types"]] == [op.type for op in ops]
    assert [data["deviceNames"][d] for d in data["devices"]] == [
        op.device for op in ops
    ]
    for place, op in enumerate(ops):
        assert read_by(data, place) == [t.name for t in op.inputs]
        waits = [data["names"][c] for c in data["controls"][place]]
        assert sorted(waits) == sorted(c.name for c in op.control_inputs)
        assert len(data["outputs"][place]) == len(op.outputs)


def test_columns_say_what_the_graph_does(folded):
    for graph in (samples.nested(), folded.before.graph):
        check_columns(drawn(graph), graph)


def test_what_an_edit_left_behind_is_counted_and_not_drawn(folded):
    """A folded norm leaves its layer, its product and its sum; all are unread."""
    m = folded.after
    graph, data = m.graph, drawn(m)
    edges = networkx.DiGraph()
    for op in graph.get_operations():
        edges.add_node(op.name)
        edges.add_edges_from((t.op.name, op.name) for t in op.inputs)
    ends = ["head", "side_effects"]
    reached = set(ends).union(*(networkx.ancestors(edges, end) for end in ends))
    left = set(edges) - reached
    check_columns(data, graph, without=left)
    assert data["leftOut"] == len(left) == 3 * 7


def test_shapes_and_types_of_outputs():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.int32, [None, 3])
        tf.compat.v1.placeholder(tf.bool, None)
        tf.no_op()
    assert drawn(graph)["outputs"] == [["int32 [?, 3]"], ["bool [...]"], []]


def attributes(data, name):
    return data["attributes"][data["names"].index(name)]


def test_attributes_are_words():
    with tf.Graph().as_default() as graph:
        x = tf.ones([1, 8, 8, 2])
        kernel = tf.constant(1.0, shape=[3, 3, 2, 5], name="kernel")
        tf.nn.conv2d(x, kernel, [1, 2, 2, 1], "SAME", name="conv")
        tf.constant([1, 2], name="small")
        tf.constant([0.123456] * 17, name="large")
        tf.constant("letters" * 100, name="text")
    data = drawn(graph)
    conv = attributes(data, "conv")
    assert conv["strides"] == "[1, 2, 2, 1]"
    assert conv["padding"] == "SAME"
    assert conv["T"] == "float32"
    assert attributes(data, "small")["value"] == "[1, 2]"
    # Values of large constants are left out, and long attributes are cut.
    assert attributes(data, "large") == {"value": "float32 (17,)"}
    assert len(attributes(data, "text")["value"]) == 200


def named(data, places):
    return {data["names"][place] for place in places}


def test_parameters_may_be_made_after_what_hands_them_on():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        twice = tf.identity(tf.cast(x, tf.float64, name="cast"), name="twice")
        reroute_ts([tf.constant([1.0, 2.0], name="weights")], [x])
        tf.square(twice, name="square")
    data = drawn(graph)
    assert named(data, data["parameters"]) == {"cast", "twice", "weights"}


def test_parameters_are_what_holds_and_reads_weights():
    weight = tf.Variable(tf.ones([3, 3]))

    @tf.function(input_signature=[tf.TensorSpec([2, 3], name="x")])
    def f(x):
        kept = tf.identity(weight, name="copy")
        return tf.matmul(x, kept, name="product") + tf.constant(2.0, name="two")

    graph = f.get_concrete_function().graph
    data = drawn(graph)
    parameters = named(data, data["parameters"])
    assert {"copy", "two"} < parameters
    assert not {"x", "product", "Identity"} & parameters
    types = {graph.get_operation_by_name(name).type for name in parameters}
    assert {"Placeholder", "ReadVariableOp", "Const"} <= types


def test_a_constant_that_waits_is_a_parameter_and_an_op_that_waits_is_none():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        with tf.control_dependencies([x.op]):
            tf.constant(1.0, name="one")
            tf.no_op(name="group")
    data = drawn(graph)
    assert named(data, data["parameters"]) == {"one"}


def test_ends_are_called_by_their_names_in_the_model(flow):
    data = drawn(flow)
    ends = {data["names"][place]: text for place, text in data["ends"].items()}
    assert set(ends.values()) == {"input x", "input n", "output y"}
    inputs = {flow.inputs[name].op.name: f"input {name}" for name in "xn"}
    assert ends.items() >= inputs.items()


def test_functions_are_drawn_and_called(flow):
    graphs = report.view(flow).payload["graphs"]
    labels = [data["label"] for data in graphs[1:]]
    assert labels == list(flow.functions)
    for data, body in zip(graphs[1:], flow.functions.values(), strict=True):
        check_columns(data, body.graph)
    main = graphs[0]
    calls = {
        main["typeNames"][main["types"][place]]: callees
        for place, callees in main["calls"].items()
    }
    assert {kind: len(callees) for kind, callees in calls.items()} == {
        "StatelessWhile": 2,
        "StatelessIf": 2,
        "PartitionedCall": 1,
    }
    called = [callee for callees in calls.values() for callee in callees]
    assert sorted(called) == sorted(labels)


def test_a_view_draws_its_ops_alone():
    graph = samples.nested()
    ops = [op for op in graph.get_operations() if op.name.startswith("outer/")]
    data = drawn(ge.SubGraphView(ops))
    assert data["names"] == [op.name for op in ops]
    inside = set(data["names"])
    for place, op in enumerate(ops):
        expected = [t.name for t in op.inputs if t.op.name in inside]
        assert read_by(data, place) == expected


def test_a_traced_function_can_be_drawn_and_what_has_no_graph_is_refused():
    traced = tf.function(tf.tanh).get_concrete_function(tf.TensorSpec([2]))
    assert "Tanh" in drawn(traced)["names"]
    for subject in (None, "model.pb", 3, tf.nn.relu):
        with pytest.raises(ArgumentTypeError, match=r"expected a Model.*model\.open"):
            report.view(subject)
        with pytest.raises(ArgumentTypeError, match="expected a Model"):
            report.diff(samples.skipping(), subject)
