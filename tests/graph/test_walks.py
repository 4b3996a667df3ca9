"""Walks, orders and names, against networkx and against Python's own recursion."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from geutil.graph import walks


def random_graph(seed: int, *, acyclic: bool) -> dict[int, list[int]]:
    """Return the successors of 30 nodes, repeated edges included."""
    draw = random.Random(seed)
    return {
        n: [
            m
            for m in (draw.randrange(30) for _ in range(draw.randrange(4)))
            if not acyclic or m < n
        ]
        for n in range(30)
    }


@pytest.mark.parametrize("seed", range(5))
def test_walk_is_breadth_first_and_yields_each_node_once(seed: int) -> None:
    following = random_graph(seed, acyclic=False)
    graph = nx.DiGraph(following)
    found = list(walks.walk([3, 7, 3], following.__getitem__))
    lengths = nx.multi_source_dijkstra_path_length(graph, {3, 7})
    assert sorted(found) == sorted(lengths)
    distances = [lengths[n] for n in found]
    assert distances == sorted(distances)
    assert found[:2] == [3, 7]
    assert list(walks.closure([3, 7], following.__getitem__)) == found


def test_walk_asks_for_no_more_than_the_caller_takes() -> None:
    asked = []

    def next_of(n: int) -> list[int]:
        asked.append(n)
        return [n + 1]

    assert any(n == 5 for n in walks.walk([0], next_of))
    assert asked == [0, 1, 2, 3, 4]


class Unequal:
    """A node that cannot be compared, as symbolic tensors cannot."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.following: list[Unequal] = []

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


def test_walk_by_identity_neither_compares_nor_hashes() -> None:
    a, b, c, d = (Unequal() for _ in range(4))
    a.following, b.following, c.following = [c, b, c], [a, d], [d]
    found = list(walks.walk_by_identity([a], lambda n: n.following))
    assert [id(n) for n in found] == [id(n) for n in (a, c, b, d)]
    assert list(walks.closure_by_identity([a], lambda n: n.following)) == [
        id(n) for n in found
    ]


def test_tree_is_depth_first_and_keeps_repetitions() -> None:
    nested = ["a", ["b", ["c", "a"], []], "d"]
    leaves = [n for n in walks.tree([nested], _children) if isinstance(n, str)]
    assert leaves == ["a", "b", "c", "a", "d"]


def _children(node: object) -> list[object]:
    return node if isinstance(node, list) else []


@pytest.mark.parametrize("seed", range(5))
def test_topological_order_of_a_graph_without_cycles(seed: int) -> None:
    inputs = random_graph(seed, acyclic=True)
    starts = [29, 4, 28, 4]
    order = walks.topological_order(starts, inputs.__getitem__, pytest.fail)
    place = {n: i for i, n in enumerate(order)}
    graph = nx.DiGraph(inputs)
    reached = set(starts).union(*(nx.descendants(graph, n) for n in starts))
    assert len(order) == len(place) and set(order) == reached
    assert all(place[m] < place[n] for n in order for m in inputs[n])
    # Depth first: networkx finishes nodes in the same order.
    assert order[: place[29] + 1] == list(nx.dfs_postorder_nodes(graph, 29))


@pytest.mark.parametrize("seed", range(5))
def test_cycles_are_reported_or_lose_an_edge(seed: int) -> None:
    inputs = random_graph(seed, acyclic=False)
    cycles: list[list[int]] = []
    order = walks.topological_order(inputs, inputs.__getitem__, cycles.append)
    assert sorted(order) == sorted(inputs)
    graph = nx.DiGraph(inputs)
    assert bool(cycles) is not nx.is_directed_acyclic_graph(graph)
    for cycle in cycles:
        assert all(
            graph.has_edge(n, m)
            for n, m in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        )
    place = {n: i for i, n in enumerate(order)}
    lost = {(n, m) for n in inputs for m in inputs[n] if place[m] >= place[n]}
    assert lost == {(cycle[-1], cycle[0]) for cycle in cycles}
    assert order == walks.topological_order(inputs, inputs.__getitem__)


def test_depth_does_not_count() -> None:
    end = 100_000
    order = walks.topological_order([end], lambda n: [n - 1] if n else [])
    assert order == list(range(end + 1))


@pytest.mark.parametrize(
    ("reference", "node"),
    [("a/b", "a/b"), ("a:1", "a"), ("a:out:1", "a"), ("^a", "a"), ("^a:1", "a")],
)
def test_node_name(reference: str, node: str) -> None:
    assert walks.node_name(reference) == node


def test_names_of_tensors() -> None:
    assert walks.tensor_parts("a/b:12") == ("a/b", 12)
    assert walks.tensor_parts("a") == ("a", 0)
    assert [walks.tensor_name(n) for n in ("a", "a:1")] == ["a:0", "a:1"]
    assert [walks.short_name(n) for n in ("a:0", "a:1", "a:10")] == ["a", "a:1", "a:10"]
    assert walks.data_inputs(["a", "^b", "c:1"]) == ["a", "c:1"]
    assert walks.control_references(["a", "^b", "c:1"]) == ["^b"]
