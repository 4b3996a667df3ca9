"""Why a pattern does not match: the nearest miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geutil.graph.kinds import Graph, Operation, require_graph, require_op
from geutil.transform.rewrite.compiling import compile_pattern
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.rewrite.matching import Match, require_one_graph
from geutil.transform.rewrite.patterns import Pattern
from geutil.transform.rewrite.search import Search
from geutil.transform.rewrite.territory import Territory


@dataclass(frozen=True, eq=False)
class Explanation:
    """How far the search for a match at one op came.

    Attributes:
        root: the op that was to be the root.
        match: the match, if there is one after all.
        reached: for each node of the pattern that stood for something when the search
            failed: the node, and the name of its op or tensor, in the order of search.
        node: the node that failed, in words; None where there is a match.
        element: the name of the op or tensor it could not stand for.
        reason: what failed.
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
        self.search: Search | None = None
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
    """Say how far a pattern matches at an op, and what stopped it.

    Every way to meet the pattern is tried; the one that came furthest is reported.

    Args:
        graph: the graph of `op`.
        pattern: the pattern.
        op: the op that the root of the pattern should stand for.

    Raises:
        ArgumentTypeError: an argument is of another type.
        SelectionError: the pattern cannot be used, or the op is of another graph.

    Cost: that of one search, bounded by the pattern.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import Any, Const, Op, explain
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
    require_graph(graph)
    require_op(op)
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
    search = Search(compiled, Territory(graph, liveness), nearest.record)
    nearest.search = search
    if search.run(op):
        return Explanation(op, Match(op, search.ops(), search.names, search.bound))
    node, element, reason = nearest.failure
    return Explanation(op, None, nearest.reached, node, element, reason)
