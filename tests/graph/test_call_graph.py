"""Orders and cycles, against networkx; the names of functions in nodes."""

import hypothesis
import networkx as nx
import tensorflow as tf
from hypothesis import strategies as st

from geutil.graph import call_graph
from geutil.graph.call_graph import needs_first, on_cycles

PROPERTY = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def needs(draw):
    count = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, count), max_size=4)  # One value is no key.
    return {key: draw(some) for key in draw(st.permutations(range(count)))}


def graph_of(needs):
    graph = nx.DiGraph()
    graph.add_nodes_from(needs)
    graph.add_edges_from((v, k) for k, vs in needs.items() for v in vs if v in needs)
    return graph


@PROPERTY
@hypothesis.given(needs())
def test_order_and_cycles(needs):
    graph = graph_of(needs)
    order = needs_first(needs)
    assert sorted(order) == sorted(needs)
    components = list(nx.strongly_connected_components(graph))
    cyclic = {k for c in components if len(c) > 1 for k in c}
    assert on_cycles(needs) == cyclic | {k for k, _ in nx.selfloop_edges(graph)}
    # Edges from one component into another are all kept.
    component = {k: i for i, c in enumerate(components) for k in c}
    place = {key: i for i, key in enumerate(order)}
    for before, after in graph.edges:
        if component[before] != component[after]:
            assert place[before] < place[after]


def test_an_order_that_is_right_is_kept():
    needs = {i: [j for j in (i - 1, i - 3) if j >= 0] for i in range(50)}
    assert needs_first(needs) == list(needs)


def test_long_chains():
    length = 100_000
    assert needs_first({i: [i + 1] for i in range(length)})[0] == length - 1
    ring = {i: [(i + 1) % length] for i in range(length)}
    assert len(on_cycles(ring)) == length


def test_functions_of_attributes_and_their_new_names():
    node = tf.compat.v1.NodeDef()
    node.attr["f"].func.name = "one"
    node.attr["none"].func.name = ""
    node.attr["text"].s = b"no_function"
    for name in ("two", "", "two", "three"):
        node.attr["list"].list.func.add(name=name)
    found = call_graph.functions_of_attributes(node.attr)
    assert sorted(found) == ["one", "three", "two", "two"]
    call_graph.rename_functions(node, {"one": "1", "two": "2"})
    found = call_graph.functions_of_attributes(node.attr)
    assert sorted(found) == ["1", "2", "2", "three"]


def test_functions_that_attributes_of_functions_name():
    node = tf.compat.v1.NodeDef(op="f")
    node.attr["one"].func.name = "outer"
    node.attr["one"].func.attr["in"].list.func.add(name="inner")
    found = call_graph.names_of_functions(node)
    assert list(found) == ["f", "outer", "inner"]
    call_graph.rename_called(node, {"f": "g", "inner": "new"})
    assert list(call_graph.names_of_functions(node)) == ["g", "outer", "new"]
