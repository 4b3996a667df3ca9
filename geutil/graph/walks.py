"""Walks over anything that has neighbours, and the names of nodes and tensors, parsed.

Nodes are told apart by equality, or by identity where they are symbolic tensors, whose
`==` may add an op to a graph. Nothing here recurses or needs TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
U = TypeVar("U")


def walk(starts: Iterable[T], next_of: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield nodes and all that they lead to, each once, breadth first.

    Args:
        starts: the nodes to start from.
        next_of: returns the nodes that one leads to; called once for each, after the
            caller has seen it.

    Cost: linear in the nodes and in what `next_of` returns.

    Example:
        >>> from geutil.graph.walks import walk
        >>> list(walk([1], lambda n: [2 * n, 2 * n + 1] if n < 4 else []))
        [1, 2, 3, 4, 5, 6, 7]
    """
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for node in waiting:
        yield node
        for following in next_of(node):
            if following not in seen:
                seen[following] = None
                waiting.append(following)


def closure(starts: Iterable[T], next_of: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return the keys that `walk` yields, in its order, as a set that keeps an order.

    Example:
        >>> from geutil.graph.walks import closure
        >>> readers = {"a": ["b", "c"], "c": ["d"]}
        >>> list(closure(["a"], lambda name: readers.get(name, ())))
        ['a', 'b', 'c', 'd']
    """
    # Not by `walk`, which would take a third longer: plans ask for many closures.
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for node in waiting:
        for following in next_of(node):
            if following not in seen:
                seen[following] = None
                waiting.append(following)
    return seen


def walk_by_identity(
    starts: Iterable[U], next_of: Callable[[U], Iterable[U]]
) -> Iterator[U]:
    """Yield the nodes that `walk` yields, for nodes that are told apart by identity."""
    seen = {id(node): node for node in starts}
    waiting = list(seen.values())
    for node in waiting:
        yield node
        for following in next_of(node):
            if id(following) not in seen:
                seen[id(following)] = following
                waiting.append(following)


def closure_by_identity(
    starts: Iterable[U], next_of: Callable[[U], Iterable[U]]
) -> dict[int, U]:
    """Return the nodes that `walk_by_identity` yields, in its order, by their `id`."""
    return {id(node): node for node in walk_by_identity(starts, next_of)}


def tree(roots: Iterable[U], children_of: Callable[[U], Iterable[U]]) -> Iterator[U]:
    """Yield the nodes of trees, depth first, each ahead of its children.

    A node that is reached twice is yielded twice: for a graph without cycles, one call
    yields a node once for each path to it.

    Args:
        roots: the roots.
        children_of: returns the children of a node; called after the caller has seen
            the node.

    Example:
        >>> from geutil.graph.walks import tree
        >>> nested = [[1, 2], 3]
        >>> list(tree(nested, lambda n: n if isinstance(n, list) else ()))
        [[1, 2], 1, 2, 3]
    """
    waiting = list(roots)[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(list(children_of(node))[::-1])


def topological_order(
    nodes: Iterable[T],
    inputs_of: Callable[[T], Iterable[T]],
    on_cycle: Callable[[list[T]], None] | None = None,
) -> list[T]:
    """Return nodes and all that they depend on, each after its inputs.

    The order of `nodes` is kept, except that inputs come just ahead of the first node
    that needs them, in the order in which `inputs_of` returns them.

    Args:
        nodes: the nodes.
        inputs_of: returns the inputs of a node, called once for each; it leaves out
            those that are not to be in the result.
        on_cycle: is called with the nodes of a cycle, each an input of the one before
            it, to raise an error. Without it, one edge of each cycle does not count.

    Cost: linear in nodes and edges.

    Example:
        >>> from geutil.graph.walks import topological_order
        >>> inputs = {"c": ["a", "b"], "a": [], "b": ["a"]}
        >>> topological_order(inputs, inputs.__getitem__)
        ['a', 'b', 'c']
    """
    order: list[T] = []
    is_placed: dict[T, bool] = {}
    for start in nodes:
        if start in is_placed:
            continue
        # False marks a node on the path: to meet it again is a cycle.
        is_placed[start] = False
        path, rests = [start], [iter(inputs_of(start))]
        while path:
            for node in rests[-1]:
                placed = is_placed.get(node)
                if placed is None:
                    is_placed[node] = False
                    path.append(node)
                    rests.append(iter(inputs_of(node)))
                    break
                if not placed and on_cycle is not None:
                    on_cycle(path[path.index(node) :])
            else:
                placed_node = path.pop()
                rests.pop()
                is_placed[placed_node] = True
                order.append(placed_node)
    return order


class DisjointSets(Generic[T]):
    """Sets of nodes that are joined one by one; each has one of its nodes as leader.

    Example:
        >>> from geutil.graph.walks import DisjointSets
        >>> sets = DisjointSets("abc")
        >>> sets.join("a", "b")
        >>> sets.leader("a"), sets.leader("b"), sets.leader("c")
        ('b', 'b', 'c')
    """

    def __init__(self, nodes: Iterable[T]) -> None:
        self._next = {node: node for node in nodes}

    def leader(self, node: T) -> T:
        """Return the leader of the set of a node."""
        ahead = self._next
        while ahead[node] != node:
            # Each look halves the way for later ones.
            ahead[node] = node = ahead[ahead[node]]
        return node

    def join(self, node: T, other: T) -> None:
        """Join the set of a node to that of another, whose leader stays."""
        self._next[self.leader(node)] = self.leader(other)


def node_name(reference: str) -> str:
    """Return the node that `node`, `node:1`, `node:output:1` or `^node` names."""
    return reference.removeprefix("^").partition(":")[0]


def data_inputs(references: Iterable[str]) -> list[str]:
    """Return the inputs of a node that are tensors, not nodes to wait for."""
    return [reference for reference in references if not reference.startswith("^")]


def control_references(references: Iterable[str]) -> list[str]:
    """Return the inputs of a node that it waits for, with their `^`."""
    return [reference for reference in references if reference.startswith("^")]


def tensor_parts(name: str) -> tuple[str, int]:
    """Return the node and the index in the name of a tensor: `x` is `x:0`.

    Example:
        >>> from geutil.graph.walks import tensor_parts
        >>> tensor_parts("a/split:1"), tensor_parts("x")
        (('a/split', 1), ('x', 0))
    """
    node, _, index = name.partition(":")
    return node, int(index or 0)


def tensor_name(name: str) -> str:
    """Return the name of a tensor with its index: `x` as `x:0`."""
    return name if ":" in name else f"{name}:0"


def short_name(name: str) -> str:
    """Return the name of a tensor as nodes write it: `x:0` as `x`."""
    return name.removesuffix(":0")
