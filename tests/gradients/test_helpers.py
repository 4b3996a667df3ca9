"""`capture_ops`, `toposort` and `format_ops`."""

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.gradients import capture_ops, format_ops, toposort
from tests.random_graphs import drawn_graphs
from tests.settings import control_flow
from tests.thorough import examples


def names(generations):
    return [[t.op.name for t in generation] for generation in generations]


@examples(50)
@given(drawn_graphs(), st.data())
def test_generations(drawn, data):
    with tf.Graph().as_default():
        tensors = drawn.build()
    numbers = range(len(tensors))
    edges = drawn.networkx(controls=True)
    places = data.draw(st.lists(st.sampled_from(numbers), unique=True))
    wanted = [tensors[i].op.name for i in places]
    allowed = data.draw(st.sets(st.sampled_from(numbers)))
    inner = edges.subgraph(f"op{i}" for i in (*places, *allowed))
    for within, reaching in ((), edges), ([[tensors[i].op for i in allowed]], inner):
        # What depends on what among the wanted ones, along any path.
        reached = nx.transitive_closure_dag(reaching).subgraph(wanted)
        got = names(toposort([tensors[i] for i in places], *within))
        expected = [sorted(g) for g in nx.topological_generations(reached)]
        assert [sorted(g) for g in got] == expected
        # Within a generation, in the order given.
        assert got == [[n for n in wanted if n in g] for g in got]


def test_outputs_of_one_op_are_of_one_generation(graph):
    a, b = tf.split(tf.zeros([4]), 2)
    c = a + b
    assert [[t.name for t in g] for g in toposort([c, b, a, b])] == [
        [b.name, a.name],
        [c.name],
    ]


def test_a_version_1_loop_is_sorted():
    with control_flow(1), tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        _, y = tf.while_loop(
            lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h)), (0, x)
        )
        inside = graph.get_tensor_by_name("while/Sin:0")
    # What an iteration yields leaves through the next one's Merge: a back edge.
    assert toposort([inside, y, x])[0] == [x]


def test_a_long_chain(graph):
    x = first = tf.constant(1.0)
    for _ in range(3000):
        x = tf.identity(x)
    assert names(toposort([x, first])) == [[first.op.name], [x.op.name]]
    assert toposort([]) == []


def test_what_is_no_tensor_or_graph():
    for wrong in (["x"], [None], [tf.Graph()]):
        with pytest.raises(ge.ArgumentTypeError, match=r"expected a tf\.Tensor"):
            toposort(wrong)
    with pytest.raises(ge.ArgumentTypeError), capture_ops("graph"):
        pass
    with pytest.raises(ge.ArgumentTypeError, match="expected ops or tensors"):
        format_ops(3)


def test_captured_ops(graph):
    tf.constant(1.0)
    with capture_ops() as ops:
        assert ops == []
        x = tf.constant(2.0, name="x")
        with capture_ops(graph) as inner:
            y = tf.negative(x, name="y")
        with capture_ops() as more:
            tf.gradients(tf.sin(y), y)
    tf.constant(3.0)
    assert [op.name for op in ops[:2]] == ["x", "y"]
    assert {"Cos", "Mul"} <= {op.type for op in more}
    assert [op.name for op in inner] == ["y"]


def test_captured_ops_of_a_block_that_fails_or_of_another_graph():
    with (
        tf.Graph().as_default(),
        pytest.raises(KeyError),
        capture_ops() as ops,
        capture_ops(tf.Graph()) as others,
    ):
        tf.constant(2.0, name="x")
        raise KeyError
    assert [op.name for op in ops] == ["x"]
    assert others == []


def test_formatting(graph):
    x = tf.constant(1.0, name="x")
    a, b = tf.split(tf.zeros([4]), 2, name="halves")
    mixed = [x, b, "text", a.op, 3]
    assert format_ops(mixed) == ["3", "halves", "halves", "text", "x"]
    as_given = ["x", "halves", "text", "halves", "3"]
    assert format_ops(mixed, sort_outputs=False) == as_given
    assert format_ops(x) == format_ops(x.op) == ["x"]
    assert format_ops([]) == []
    assert format_ops(t for t in [x]) == ["x"]
