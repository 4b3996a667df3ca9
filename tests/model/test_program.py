import itertools

import networkx as nx
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.model.programs import (
    cycle_of,
    fresh_name,
    legal_name,
    nodes_ahead,
    nodes_behind,
)
from tests.thorough import length


@st.composite
def drawn_edges(draw, acyclic):
    count = draw(st.integers(1, 12))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = draw(st.lists(pairs, max_size=30))
    if acyclic:
        edges = [(min(a, b), max(a, b)) for a, b in edges if a != b]
    return count, sorted(set(edges))


def graph_def_of(count, edges):
    inputs = [[] for _ in range(count)]
    for a, b in edges:
        inputs[b].append(f"^n{a}" if (a + b) % 3 == 0 else f"n{a}:1")
    graph_def = tf.compat.v1.GraphDef()
    for i, names in enumerate(inputs):
        graph_def.node.add(name=f"n{i}", op="Any", input=names)
    return graph_def


@given(drawn_edges(acyclic=False))
def test_a_cycle_is_found_as_networkx_finds_one(drawn):
    count, edges = drawn
    reference = nx.DiGraph(edges)
    reference.add_nodes_from(range(count))
    cycle = cycle_of(graph_def_of(count, edges))
    assert (cycle is None) == nx.is_directed_acyclic_graph(reference)
    if cycle is not None:
        assert cycle[0] == cycle[-1]
        for a, b in itertools.pairwise(cycle):
            assert reference.has_edge(int(a[1:]), int(b[1:]))


@given(drawn_edges(acyclic=True), st.data())
def test_nodes_behind_are_the_ancestors(drawn, data):
    count, edges = drawn
    number = st.integers(0, count - 1)
    ends = data.draw(st.lists(number, max_size=4))
    stops = data.draw(st.lists(number, max_size=4))
    reference = nx.DiGraph([(a, b) for a, b in edges if b not in stops])
    reference.add_nodes_from(range(count))
    expected = set(ends).union(*(nx.ancestors(reference, e) for e in ends))
    found = nodes_behind(
        graph_def_of(count, edges), [f"n{e}" for e in ends], [f"n{s}" for s in stops]
    )
    assert [node.name for node in found] == [f"n{i}" for i in sorted(expected)]


@given(drawn_edges(acyclic=False), st.booleans(), st.data())
def test_nodes_ahead_are_the_descendants(drawn, data_only, data):
    count, edges = drawn
    starts = data.draw(st.lists(st.integers(0, count - 1), max_size=4))
    # Where graph_def_of makes a control edge.
    kept = [(a, b) for a, b in edges if not data_only or (a + b) % 3]
    reference = nx.DiGraph(kept)
    reference.add_nodes_from(range(count))
    expected = set(starts).union(*(nx.descendants(reference, s) for s in starts))
    graph_def = graph_def_of(count, edges)
    found = nodes_ahead(graph_def, [f"n{s}" for s in starts], data_only=data_only)
    assert found == {f"n{i}" for i in expected}


def test_nodes_ahead_end_at_types():
    graph_def = graph_def_of(4, [(0, 1), (1, 2), (2, 3)])
    graph_def.node[2].op = "Merge"
    found = nodes_ahead(graph_def, ["n0"], until=frozenset(["Merge"]))
    assert found == {"n0", "n1"}


def test_a_long_chain_is_walked():
    count = length(100_000)
    graph_def = graph_def_of(count, [(i, i + 1) for i in range(count - 1)])
    assert len(nodes_behind(graph_def, [f"n{count - 1}"])) == count
    assert cycle_of(graph_def) is None


def test_legal_and_fresh_names():
    legal = {"a/b": "a/b", "a b:0": "a_b_0", "_x": "n_x", "ä": "n_", "": "n"}
    assert {name: legal_name(name) for name in legal} == legal
    with tf.Graph().as_default():
        for name in sorted(set(legal.values())):
            assert tf.constant(1, name=name).op.name == name
    assert fresh_name({"a"}, "b") == "b"
    assert fresh_name({"a", "a_1"}, "a") == "a_2"
