"""`capture_ops`, `toposort` and `format_ops`."""

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import geutil as ge
from geutil.gradients import capture_ops, format_ops, toposort
from tests.random_graphs import drawn_graphs


def names(generations):
    return [[t.op.name for t in generation] for generation in generations]


@settings(deadline=None, max_examples=50)
@given(drawn_graphs(), st.data())
def test_generations(drawn, data):
    with tf.Graph().as_default():
        tensors = drawn.build()
    edges = drawn.networkx(controls=True)
    count = len(tensors)
    order = data.draw(st.permutations(range(count)))
    wanted = [f"op{i}" for i in order[: data.draw(st.integers(0, count))]]
    by_name = {t.op.name: t for t in tensors}
    # What depends on what among the wanted ones, along any path.
    reached = nx.transitive_closure_dag(edges).subgraph(wanted)
    expected = [sorted(g) for g in nx.topological_generations(reached)]
    got = names(toposort([by_name[n] for n in wanted]))
    assert [sorted(g) for g in got] == expected
    # Within a generation, in the order given.
    assert got == [[n for n in wanted if n in g] for g in got]


@settings(deadline=None, max_examples=50)
@given(drawn_graphs(), st.data())
def test_generations_within(drawn, data):
    with tf.Graph().as_default():
        tensors = drawn.build()
    numbers = range(len(tensors))
    wanted = data.draw(st.lists(st.sampled_from(numbers), unique=True))
    allowed = data.draw(st.sets(st.sampled_from(numbers)))
    inner = {f"op{i}" for i in (*wanted, *allowed)}
    edges = drawn.networkx(controls=True).subgraph(inner)
    reached = nx.transitive_closure_dag(edges).subgraph(f"op{i}" for i in wanted)
    expected = [sorted(g) for g in nx.topological_generations(reached)]
    got = toposort([tensors[i] for i in wanted], [tensors[i].op for i in allowed])
    assert [sorted(g) for g in names(got)] == expected


def test_outputs_of_one_op_are_of_one_generation():
    with tf.Graph().as_default():
        a, b = tf.split(tf.zeros([4]), 2)
        c = a + b
    assert [[t.name for t in g] for g in toposort([c, b, a, b])] == [
        [b.name, a.name],
        [c.name],
    ]


def test_a_version_1_loop_is_sorted():
    v2 = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = tf.constant(1.0, name="x")
            _, y = tf.while_loop(
                lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h)), (0, x)
            )
            inside = graph.get_tensor_by_name("while/Sin:0")
    finally:
        if v2:
            tf.compat.v1.enable_control_flow_v2()
    # What an iteration yields leaves through the next one's Merge: a back edge.
    assert toposort([inside, y, x])[0] == [x]


def test_a_long_chain():
    with tf.Graph().as_default():
        x = first = tf.constant(1.0)
        for _ in range(3000):
            x = tf.identity(x)
    assert names(toposort([x, first])) == [[first.op.name], [x.op.name]]


def test_nothing():
    assert toposort([]) == []


@pytest.mark.parametrize("given", [["x"], [None], [tf.Graph()]])
def test_what_is_no_tensor(given):
    with pytest.raises(ge.ArgumentTypeError, match=r"expected a tf\.Tensor"):
        toposort(given)


def test_captured_ops():
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
        with capture_ops() as ops:
            assert ops == []
            x = tf.constant(2.0, name="x")
            with capture_ops(graph) as inner:
                tf.negative(x, name="y")
        tf.constant(3.0)
    assert [op.name for op in ops] == ["x", "y"]
    assert [op.name for op in inner] == ["y"]


def test_captured_ops_of_a_block_that_fails():
    with tf.Graph().as_default(), pytest.raises(KeyError), capture_ops() as ops:
        tf.constant(2.0, name="x")
        raise KeyError
    assert [op.name for op in ops] == ["x"]


def test_captured_ops_of_another_graph():
    with tf.Graph().as_default(), capture_ops(tf.Graph()) as ops:
        tf.constant(2.0)
    assert ops == []


def test_captured_ops_of_gradients():
    with tf.Graph().as_default():
        x = tf.ones([2])
        y = tf.sin(x)
        with capture_ops() as ops:
            tf.gradients(y, x)
    assert {"Cos", "Mul"} <= {op.type for op in ops}


def test_capturing_needs_a_graph():
    with pytest.raises(ge.ArgumentTypeError), capture_ops("graph"):
        pass


def test_formatting():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        a, b = tf.split(tf.zeros([4]), 2, name="halves")
    mixed = [x, b, "text", a.op, 3]
    assert format_ops(mixed) == ["3", "halves", "halves", "text", "x"]
    assert format_ops(mixed, sort_outputs=False) == [
        "x",
        "halves",
        "text",
        "halves",
        "3",
    ]
    assert format_ops(x) == format_ops(x.op) == ["x"]
    assert format_ops([]) == []
    assert format_ops(t for t in [x]) == ["x"]
    with pytest.raises(ge.ArgumentTypeError, match="expected ops or tensors"):
        format_ops(3)
