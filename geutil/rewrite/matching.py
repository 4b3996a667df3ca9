"""Matches of a pattern in a graph, and why there is none: the nearest miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.errors import SelectionError
from geutil.graph import adjacency, types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.rewrite.compiling import Compiled, compile_pattern
from geutil.rewrite.liveness import Liveness, Territory
from geutil.rewrite.patterns import Pattern
from geutil.rewrite.search import PatternSearch
from geutil.select.conversions import graph_of_all, make_list_of_op


@dataclass(frozen=True, eq=False)
class Match:
    """A place in a graph where a pattern holds.

    `match["name"]` is the op or tensor that was captured under a name, and
    `match[node]` the one that a node of the pattern corresponds to. The captures of
    alternatives that were not taken are missing: `get` returns None for it.

    Attributes:
        root: the op that the root of the pattern corresponds to.
        ops: the ops that Op nodes correspond to, each once, the root first. The tensors
            of leaves (Any, Const, ...) are no part of the match.
        captures: the captured ops and tensors, by name.
    """

    root: Operation
    ops: tuple[Operation, ...]
    captures: Mapping[str, Any]
    _bound: Mapping[int, Any] = field(repr=False)

    def __getitem__(self, key: str | Pattern) -> Any:
        element = self.get(key)
        if element is None:
            raise KeyError(
                f"the match at '{self.root.name}' captured no {key!r}; it has "
                f"{sorted(self.captures)}, and get() returns None for the rest"
            )
        return element

    def __contains__(self, key: str | Pattern) -> bool:
        return self.get(key) is not None

    def get(self, key: str | Pattern) -> Any:
        """Return the op or tensor of a name or a node, or None."""
        if isinstance(key, Pattern):
            return self._bound.get(id(key))
        return self.captures.get(key)

    def tensors(self) -> dict[str, Tensor]:
        """Return the captured tensors by name, in the order of their capture."""
        return {
            name: element
            for name, element in self.captures.items()
            if not types.is_op(element)
        }

    def __repr__(self) -> str:
        return f"Match('{self.root.name}', {len(self.ops)} ops)"


class Finder:
    """Finds the match of one pattern at one op."""

    def __init__(self, compiled: Compiled, territory: Territory) -> None:
        self.compiled = compiled
        self._search = PatternSearch(compiled, territory)

    def find(self, op: Operation, producers: list[str]) -> Match | str | None:
        """Return the match with root `op`; a failed constraint; or None."""
        if not self.compiled.may_match(producers):
            return None
        search = self._search
        if search.run(op):
            return Match(op, search.ops(), search.names, search.bound)
        # The match without its constraints tells which of them fails.
        if search.constrained and search.run(op, strict=False):
            return search.objection(op)
        return None


def match(
    graph_or_ops: Graph | Iterable[Operation],
    pattern: Pattern,
    *,
    overlaps: bool = False,
) -> list[Match]:
    """Return the matches of a pattern.

    At most one match is found for each op that may be its root: the one that comes
    first when alternatives are taken in the order of the pattern, and commutative
    inputs in the order of the graph. Two matches overlap when they share an op; that
    they share a constant, a variable or an input does not count. Of matches that
    overlap the one further downstream counts: roots are visited consumers first, and a
    match that shares an op with a match found before is left out. So a pattern
    `Op("Relu", conv) | conv` takes the Relu along where there is one.

    No match crosses a version 1 control-flow context. Bodies of functions are graphs of
    their own: match in them separately. Ops that `rewrite` left without readers are not
    matched.

    Args:
        graph_or_ops: a graph; or ops of one, and then every op of a match is among
            them.
        pattern: the pattern; its root is an op or a choice of ops.
        overlaps: whether matches that overlap are returned too.

    Returns:
        The matches, their roots in topological order.

    Raises:
        ArgumentTypeError: an argument is of another type.
        SelectionError: the pattern cannot be used (its root is no op, a name is that of
            an op and of a tensor), the ops belong to different graphs, or a search
            takes too long.

    Cost: linear in the ops; at each op of an anchor type bounded by the pattern, and
    for `only_consumer` linear in the readers of the op.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import Any, Const, Op, match
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.nn.relu(tf.add(tf.constant([1.0, 2.0], name="b"), x), name="y")
        >>> pattern = Op(
        ...     "Relu", Op("AddV2", Any("x"), Const("b"), commutative=True), name="relu"
        ... )
        >>> [found] = match(graph, pattern)
        >>> found, found["relu"].name
        (Match('y', 2 ops), 'y')
    """
    compiled = compile_pattern(pattern)
    listed = make_list_of_op(graph_or_ops)
    graph = graph_of_all(listed)
    if graph is None:
        return []
    whole = graph_or_ops is graph
    liveness = Liveness(graph)
    territory = Territory(graph, liveness, None if whole else listed)
    finder = Finder(compiled, territory)
    matches: list[Match] = []
    matched_ops: set[Operation] = set()
    # From the last op on, as `rewrite` visits them: both take the same overlaps.
    for op in reversed(adjacency.topological_sort(listed)):
        if not is_anchor(compiled, op) or liveness.is_retired(op):
            continue
        candidate = finder.find(op, producer_types(op))
        if isinstance(candidate, Match) and (
            overlaps or matched_ops.isdisjoint(candidate.ops)
        ):
            matches.append(candidate)
            matched_ops.update(candidate.ops)
    return matches[::-1]


def is_anchor(compiled: Compiled, op: Operation) -> bool:
    """Tell whether the type of `op` is one that the root may have."""
    return compiled.types is None or op.type in compiled.types


def producer_types(op: Operation) -> list[str]:
    """Return the types of the ops that yield the inputs of `op`."""
    return [tensor.op.type for tensor in op.inputs]


def require_one_graph(ops: Iterable[Operation], graph: Graph) -> list[Operation]:
    """Return `ops` as a list, and refuse ops of another graph than `graph`."""
    listed = make_list_of_op(ops)
    for op in listed:
        if op.graph is not graph:
            raise SelectionError(
                f"'{op.name}' belongs to another graph than the one to rewrite; pass "
                "ops of that graph"
            )
    return listed


@dataclass(frozen=True, eq=False)
class Explanation:
    """How far the search for a match at one op came.

    Attributes:
        root: the op that was to be the root.
        match: the match, if there is one after all.
        reached: for each node of the pattern that corresponded to something when the
            search failed: the node, and the name of its op or tensor, in the order of
            search.
        node: the node that failed, in words; None where there is a match.
        element: the name of the op or tensor it could not correspond to.
        reason: the failure.
    """

    root: Operation
    match: Match | None = None
    reached: tuple[tuple[str, str], ...] = ()
    node: str | None = None
    element: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.match is not None:
            return f"'{self.root.name}' matches with {len(self.match.ops)} op(s)"
        lines = [f"'{self.root.name}' does not match:"]
        lines += [f"  {node} is '{element}'" for node, element in self.reached]
        lines.append(f"  {self.node} is not '{self.element}': {self.reason}")
        return "\n".join(lines)


class _NearestMiss:
    """Keeps the failure that came after the most bindings, of equals the first."""

    def __init__(self) -> None:
        self.search: PatternSearch | None = None
        self.progress = -1
        self.failure: tuple[str, str, str] = ("", "", "")
        self.reached: tuple[tuple[str, str], ...] = ()

    def record(self, progress: int, node: Pattern, element: Any, reason: str) -> None:
        if progress > self.progress and self.search is not None:
            self.progress = progress
            self.failure = node.describe(), element.name, reason
            nodes = {id(n): n for n in self.search.compiled.nodes}
            self.reached = tuple(
                (nodes[key].describe(), bound.name)
                for key, bound in self.search.bound.items()
            )


def explain(graph: Graph, pattern: Pattern, op: Operation) -> Explanation:
    """Say how far a pattern matches at an op, and where it stops.

    Every way to meet the pattern is tried; the one that came furthest is reported.

    Args:
        graph: the graph of `op`.
        pattern: the pattern.
        op: the op that the root of the pattern should correspond to.

    Raises:
        ArgumentTypeError: an argument is of another type.
        SelectionError: the pattern cannot be used, or the op is of another graph.

    Cost: that of one search, bounded by the pattern.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import Any, Const, Op, explain
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.nn.relu(tf.add(x, tf.negative(x, name="n"), name="a"), name="y")
        >>> print(explain(graph, Op("Relu", Op("AddV2", Any(), Const("b"))), y.op))
        'y' does not match:
          Op('Relu') is 'y'
          Op('AddV2') is 'a'
          Any() is 'x:0'
          Const('b') is not 'n:0': it comes from Neg, not a constant
    """
    types.require_graph(graph)
    types.require_op(op)
    require_one_graph([op], graph)
    compiled = compile_pattern(pattern)
    liveness = Liveness(graph)
    if liveness.is_retired(op):
        return Explanation(
            op,
            node=pattern.describe(),
            element=op.name,
            reason="a rewrite replaced it, and nobody reads it any more",
        )
    nearest = _NearestMiss()
    search = PatternSearch(compiled, Territory(graph, liveness), nearest.record)
    nearest.search = search
    if search.run(op):
        return Explanation(op, Match(op, search.ops(), search.names, search.bound))
    node, element, reason = nearest.failure
    return Explanation(op, None, nearest.reached, node, element, reason)
