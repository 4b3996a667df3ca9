"""Helpers that code for memory-saving gradients builds on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import adjacency, state, types
from geutil.graph.types import Graph, Operation, Tensor


@contextmanager
def capture_ops(graph: Graph | None = None) -> Iterator[list[Operation]]:
    """Collect the ops that are created in a block.

    Args:
        graph: the graph to watch; the default graph if None.

    Yields:
        A list that holds the new ops, in order of creation, once the block has ended,
        also by an error.

    Raises:
        ArgumentTypeError: `graph` is no graph.

    Cost: one listing of the ops of the graph.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import capture_ops
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0)
        ...     with capture_ops(graph) as ops:
        ...         y = tf.negative(x, name="y")
        >>> [op.name for op in ops]
        ['y']
    """
    if graph is None:
        graph = tf.compat.v1.get_default_graph()
    types.require_graph(graph)
    captured: list[Operation] = []
    before = state.count_ops(graph)
    try:
        yield captured
    finally:
        captured.extend(state.ops_since(graph, before))


def toposort(
    tensors: Iterable[Tensor], within_ops: Iterable[Operation] | None = None
) -> list[list[Tensor]]:
    """Sort tensors into generations: each depends on some of an earlier one.

    A tensor depends on another when a path of data and control edges leads from that
    one's op to its own. Outputs of one op are of the same generation.

    Args:
        tensors: tensors of one graph.
        within_ops: the ops that paths may lead through; all if None.

    Returns:
        The generations, the first without dependencies among `tensors`; in each,
        tensors keep the order in which they were given.

    Raises:
        ArgumentTypeError: something given is no tensor of a graph.

    Cost: linear in the ops behind `tensors` and their edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import toposort
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.abs(y, name="z")
        >>> [[t.name for t in generation] for generation in toposort([z, x])]
        [['x:0'], ['z:0']]
    """
    unique_tensors = types.unique(tensors)
    for t in unique_tensors:
        types.require_tensor(t)
    allowed = None if within_ops is None else frozenset(within_ops)
    ends = {t.op: None for t in unique_tensors}
    generation = _generations(list(ends), frozenset(ends), allowed)
    sorted_: dict[int, list[Tensor]] = {}
    for t in unique_tensors:
        sorted_.setdefault(generation[t.op], []).append(t)
    return [sorted_[number] for number in sorted(sorted_)]


def _generations(
    ends: list[Operation],
    members: frozenset[Operation],
    allowed: frozenset[Operation] | None,
) -> dict[Operation, int]:
    """Return, for each op behind `ends`, how many members a path to it can meet.

    The op itself counts when it is a member.
    """
    generation_of: dict[Operation, int] = {}
    waiting = list(ends)
    while waiting:
        op = waiting[-1]
        if op in generation_of:
            waiting.pop()
            continue
        behind = [
            p
            for p in adjacency.predecessors(op)
            if p in members or allowed is None or p in allowed
        ]
        missing = [p for p in behind if p not in generation_of]
        if missing:
            waiting += missing
            continue
        longest = max((generation_of[p] for p in behind), default=0)
        generation_of[op] = longest + (op in members)
        waiting.pop()
    return generation_of


def format_ops(ops: Any, sort_outputs: bool = True) -> list[str]:
    """Return the names of ops and tensors, for printing.

    A tensor is called as its op is; anything else is turned into a string.

    Args:
        ops: an op, a tensor, or an iterable of them, which may be nested in no way.
        sort_outputs: whether the names are sorted.

    Raises:
        ArgumentTypeError: `ops` cannot be iterated.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import format_ops
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        >>> format_ops([x, x.op, "other"])
        ['other', 'x', 'x']
    """
    if types.is_op(ops) or types.is_tensor(ops):
        ops = [ops]
    if not isinstance(ops, Iterable):
        raise ArgumentTypeError(f"expected ops or tensors, got {ops!r}")
    names = [_name(element) for element in ops]
    return sorted(names) if sort_outputs else names


def _name(element: Any) -> str:
    if types.is_tensor(element):
        element = element.op
    return str(element.name) if types.is_op(element) else str(element)
