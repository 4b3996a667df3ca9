"""The least cut, against networkx."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from geutil.gradients.loops.least_cut import least_cut


@st.composite
def problems(draw):
    count = draw(st.integers(1, 12))
    weights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    read = [
        sorted(draw(st.sets(st.integers(0, i - 1), max_size=4))) if i else []
        for i in range(count)
    ]
    nodes = st.sets(st.integers(0, count - 1))
    return weights, read, sorted(draw(nodes)), sorted(draw(nodes))


def parted(read, given_nodes, needed, cut):
    """Return whether each way from a given node to a needed one meets the cut."""
    waiting = [n for n in needed if n not in cut]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in given_nodes:
            return False
        more = [n for n in read[node] if n not in cut and n not in met]
        met.update(more)
        waiting += more
    return True


@given(problems())
def test_a_cut_is_one_and_none_weighs_less(problem):
    weights, read, given_nodes, needed = problem
    graph = nx.DiGraph()
    graph.add_nodes_from(["from", "to"])
    for i, weight in enumerate(weights):
        graph.add_edge((i, 0), (i, 1), capacity=weight)
        graph.add_edges_from(((j, 1), (i, 0)) for j in read[i])
    graph.add_edges_from(("from", (i, 0)) for i in given_nodes)
    graph.add_edges_from(((i, 1), "to") for i in needed)

    cut = least_cut(weights, read, given_nodes, needed)

    assert sum(weights[i] for i in cut) == nx.minimum_cut_value(graph, "from", "to")
    assert parted(read, given_nodes, needed, cut)


def test_of_equals_the_cut_nearest_to_what_is_needed():
    # A chain of nodes that weigh the same.
    assert least_cut([3, 3, 3], [[], [0], [1]], [0], [2]) == [2]


def test_nothing_is_cut_where_nothing_is_given():
    assert least_cut([3, 3], [[], [0]], [], [1]) == []
    assert least_cut([], [], [], []) == []


def test_a_long_chain():
    count = 20_000
    weights = [2] * count
    weights[7] = 1
    read = [[i - 1] if i else [] for i in range(count)]
    assert least_cut(weights, read, [0], [count - 1]) == [7]
