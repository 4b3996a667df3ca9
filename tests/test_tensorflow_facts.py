"""Facts about TensorFlow that geutil is built around, each in its smallest form.

When one of these fails on a new TensorFlow, the code that cites it can be made simpler.
Those about Sessions and built functions are in `tests/graph/test_staleness.py`.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util._pywrap_util_port import IsMklEnabled

from tests.memory.tracing import optimized

v1 = tf.compat.v1


def test_two_loops_that_share_bodies_cannot_both_be_differentiated(control_flow_v2):
    # geutil.graph.functions gives the loops of a copy bodies of their own.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], name="x")
        y = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * x), [0, 1.0])[1]
        definition = graph.as_graph_def()
        tf.gradients(y, x)
        tf.import_graph_def(definition, name="other/deeper")
        x_ = graph.get_tensor_by_name("other/deeper/x:0")
        y_ = graph.get_tensor_by_name(f"other/deeper/{y.name}")
        with pytest.raises(tf.errors.InvalidArgumentError, match="duplicate function"):
            tf.gradients(y_, x_)


def test_the_importer_makes_nodes_in_the_order_of_the_graph_def():
    # geutil.graph.creation tells by this which new op belongs to which node.
    with tf.Graph().as_default() as graph:
        for name in ("z", "y", "x"):
            tf.constant(1.0, name=name)
        tf.add_n([graph.get_tensor_by_name("z:0")], name="a")
    definition = graph.as_graph_def()
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(definition, name="")
    names = [op.name for op in imported.get_operations()]
    assert names == [node.name for node in definition.node]


def test_the_importer_renames_an_op_that_is_called_like_a_scope():
    with tf.Graph().as_default() as graph:
        tf.constant(1.0, name="a")
    definition = graph.as_graph_def()
    with tf.Graph().as_default() as other:
        definition.node[0].name = "a/b"
        tf.import_graph_def(definition, name="")
        definition.node[0].name = "a"
        tf.import_graph_def(definition, name="")
    assert [op.name for op in other.get_operations()] == ["a/b", "a_1"]


def test_the_importer_misleads_the_loop_edges_of_ops_that_it_renames(control_flow_v1):
    # geutil.transform.op_copies renames the nodes itself when there is a loop.
    with tf.Graph().as_default() as graph:
        v1.while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, 2 * a), [tf.constant(0)] * 2
        )
    known = set(graph.get_operations())
    with graph.as_default():
        tf.import_graph_def(graph.as_graph_def(), name="")
    merges = [
        op for op in graph.get_operations() if op.type == "Merge" and op not in known
    ]
    loop_edges = [(m.inputs[1].op.name, m.node_def.input[1]) for m in merges]
    # The edge is right, what a Session is told is not: it runs the second spelling.
    assert loop_edges == [
        ("while/NextIteration_2", "while/NextIteration"),
        ("while/NextIteration_1_1", "while/NextIteration_1"),
    ]


def test_grappler_folds_sums_through_a_feed():
    # tests.settings.evaluate runs its references without Grappler when it feeds.
    with tf.Graph().as_default() as graph:
        x = tf.constant([1.0, 2.0])
        inner = tf.add_n([x, x])
        outer = tf.add_n([inner, inner])
        tf.add_n([inner, inner], name="second_reader")
    values = []
    for disabled in (True, False):
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = disabled
        with v1.Session(graph=graph, config=config) as session:
            values.append(session.run(outer, {inner: [10.0, 10.0]}))
    np.testing.assert_array_equal(values, [[20.0, 20.0], [4.0, 8.0]])


def test_a_shape_check_refuses_the_whole_import():
    # geutil.transform.op_copies relies on it: a refused copy leaves no op behind.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2, 3], name="x")
        tf.matmul(tf.identity(x, name="y"), tf.ones([3, 2]), name="z")
    definition = graph.as_graph_def()
    with tf.Graph().as_default() as other:
        narrow = v1.placeholder(tf.float32, [2, 4])
        with pytest.raises(ValueError, match="Dimensions must be equal"):
            tf.import_graph_def(definition, {"x:0": narrow}, name="")
    assert len(other.get_operations()) == 1


@pytest.mark.skipif(not IsMklEnabled(), reason="only oneDNN merges them")
@pytest.mark.parametrize("waits", [False, True])
def test_onednn_merges_the_gradients_of_a_filter_and_a_bias(waits):
    # geutil.gradients.step ties such pairs, so that no segment comes in between.
    with tf.Graph().as_default() as graph:
        gradient = v1.placeholder(tf.float32, [1, 2, 2, 1])
        bias = tf.raw_ops.BiasAddGrad(out_backprop=gradient)
        with tf.control_dependencies([bias] if waits else []):
            x = tf.raw_ops.PlaceholderWithDefault(input=gradient, shape=[1, 2, 2, 1])
        kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=x,
            filter_sizes=[1, 1, 1, 1],
            out_backprop=gradient,
            strides=[1] * 4,
            padding="SAME",
        )
    feed = {gradient: np.ones([1, 2, 2, 1])}
    with v1.Session(graph=graph) as session:
        if waits:
            with pytest.raises(tf.errors.InvalidArgumentError):
                session.run([kernel, bias], feed)
        else:
            values = session.run([kernel, bias], feed)
            assert [v.item() for v in values] == [4.0, 4.0]


@pytest.mark.parametrize("disabled", [True, False])
def test_grappler_adds_in_the_order_of_names(disabled):
    # geutil.gradients.step keeps the order that was given: without Grappler, the bits
    # are those of TensorFlow.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [64])
        terms = [
            tf.sin(x * float(number), name="cba"[number - 1]) for number in (1, 2, 3)
        ]
        total = tf.add_n(terms)
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = disabled
    with v1.Session(graph=graph, config=config) as session:
        feed = {x: np.linspace(0.0, 7.0, 64)}
        value, (c, b, a) = session.run((total, terms), feed)
    assert np.any((c + b) + a != (a + b) + c)
    np.testing.assert_array_equal(value, (c + b) + a if disabled else (a + b) + c)


@pytest.mark.parametrize("order", ["read first", "added first"])
def test_what_a_sum_begins_with_depends_on_what_ran_before(order):
    # geutil.gradients.construction says what follows. Here a control edge
    # decides; without one it is left to chance, also with deterministic ops.
    with tf.Graph().as_default() as graph:
        fed = [v1.placeholder(tf.float32, [64]) for _ in range(2)]
        x, y = (tf.sin(tensor) for tensor in fed)
        total = tf.raw_ops.AddN(inputs=[x, x, y])
        other = tf.exp(y)
        first, second = (
            (other.op, total.op) if order == "read first" else (total.op, other.op)
        )
        second._add_control_input(first)
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    a, b = (np.linspace(start, 7.0, 64, dtype=np.float32) for start in (0.0, 1.0))
    with v1.Session(graph=graph, config=config) as session:
        feed = dict(zip(fed, (a, b), strict=True))
        value, _ = session.run((total, other), feed)
        a, b = session.run((x, y), feed)
    assert np.any((a + a) + b != (b + a) + a)
    expected = (b + a) + a if order == "read first" else (a + a) + b
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("read_twice", [False, True])
def test_grappler_pools_before_an_activation(read_twice):
    # geutil.gradients.construction keeps the two apart where the pool has a gradient.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [1, 4, 4, 2], name="x")
        y = tf.nn.relu(x, name="y")
        z = tf.nn.max_pool2d(y, 2, 2, "SAME", name="z")
        fetches = [tf.exp(z, name="fetched"), *([y * y] if read_twice else [])]
    nodes = optimized(graph, fetches)
    assert nodes["z"].op == "MaxPool"
    assert nodes["z"].input[0] == ("y" if read_twice else "x")
