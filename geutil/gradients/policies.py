"""Checkpoints in a caller's words: policies, and lists of the ops of a graph.

A policy is any function from a forward tensor to a truth value. "Every add under stereo
and every Conv2D under motion, but nothing of a batch norm" is

    all_of(
        any_of(
            all_of(inside("stereo"), by_type("Add", "AddV2")),
            all_of(inside("motion"), by_type("Conv2D")),
        ),
        not_(by_name("BatchNorm")),
    )
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import adjacency, state, types
from geutil.graph.types import Graph, Operation, Tensor, type_name
from geutil.graph.walks import closure
from geutil.memory.costs import tensor_bytes

Policy: TypeAlias = Callable[[Tensor], bool]
"""Returns whether to keep a forward tensor."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that reports can name."""

    name: str
    test: Policy

    def __call__(self, tensor: Tensor) -> bool:
        """Return whether to keep a tensor."""
        return self.test(tensor)

    def __str__(self) -> str:
        return self.name


def name_of_policy(policy: Policy) -> str:
    """Return the name of a policy in reports."""
    if isinstance(policy, NamedPolicy):
        return policy.name
    return str(getattr(policy, "__name__", type(policy).__name__))


def _listed(name: str, policies: Iterable[Policy]) -> str:
    return f"{name}({', '.join(map(name_of_policy, policies))})"


def by_name(pattern: str | re.Pattern[str]) -> Policy:
    """Return the policy that keeps outputs of ops whose name contains a regex match.

    Args:
        pattern: a regular expression, searched for in the name of the op.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_name
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="block1/out")
        >>> by_name("block[0-9]+/out$")(x)
        True
    """
    regex = re.compile(pattern)
    return NamedPolicy(
        f"by_name({regex.pattern!r})",
        lambda tensor: regex.search(tensor.op.name) is not None,
    )


def by_type(*types: str) -> Policy:
    """Return the policy that keeps outputs of ops of the given types.

    Args:
        types: types of ops, such as "Conv2D".

    Raises:
        ArgumentTypeError: no type is given, or one is not a string.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_type
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]))
        >>> by_type("Relu", "Relu6")(x), by_type("Conv2D")(x)
        (True, False)
    """
    if not types:
        raise ArgumentTypeError("by_type needs at least one type, such as 'Conv2D'")
    for name in types:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"a type of op is a string, got {type_name(name)}")
    op_types = frozenset(types)
    return NamedPolicy(
        f"by_type({', '.join(map(repr, types))})",
        lambda tensor: tensor.op.type in op_types,
    )


def larger_than(size: int) -> Policy:
    """Return the policy that keeps tensors of more than `size` bytes.

    An open dimension counts as in the report (see `shapes` of `gradients`), else as 32.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import larger_than
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([256, 4])
        >>> larger_than(4095)(x), larger_than(4096)(x)
        (True, False)
    """
    return NamedPolicy(
        f"larger_than({size})", lambda tensor: tensor_bytes(tensor) > size
    )


def inside(scope: str) -> Policy:
    """Return the policy that keeps outputs of ops under a name scope.

    Args:
        scope: the scope, which may occur anywhere in the name between slashes; a
            trailing slash makes no difference.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import inside
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="net/stereo/conv/out")
        >>> inside("stereo")(x), inside("net/stereo/")(x), inside("ster")(x)
        (True, True, False)
    """
    scope_path = f"/{scope.strip('/')}/"
    return NamedPolicy(
        f"inside({scope!r})",
        lambda tensor: scope_path in f"/{tensor.op.name.rpartition('/')[0]}/",
    )


def any_of(*policies: Policy) -> Policy:
    """Return the policy that keeps the tensors of any of `policies`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import any_of, by_type, inside
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]), name="block/x")
        >>> any_of(by_type("Conv2D"), inside("block"))(x)
        True
    """
    return NamedPolicy(
        _listed("any_of", policies),
        lambda tensor: any(policy(tensor) for policy in policies),
    )


def all_of(*policies: Policy) -> Policy:
    """Return the policy that keeps the tensors that all of `policies` keep.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import all_of, by_type, inside
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]), name="block/x")
        >>> all_of(by_type("Conv2D"), inside("block"))(x)
        False
    """
    return NamedPolicy(
        _listed("all_of", policies),
        lambda tensor: all(policy(tensor) for policy in policies),
    )


def not_(policy: Policy) -> Policy:
    """Return the policy that keeps the tensors that `policy` does not.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_name, not_
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="BatchNorm/x")
        >>> not_(by_name("BatchNorm"))(x)
        False
    """
    return NamedPolicy(_listed("not_", [policy]), lambda tensor: not policy(tensor))


@contextmanager
def capture_ops(graph: Graph | None = None) -> Iterator[list[Operation]]:
    """Collect the ops that are created in a block.

    Args:
        graph: the graph to watch; the default graph if None.

    Yields:
        A list that holds the new ops, in order of creation, once the block has ended,
        even by an error.

    Raises:
        ArgumentTypeError: `graph` is not a graph.

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
    """Sort tensors into generations, in topological order of their dependencies.

    A tensor depends on another if a path of data and control edges leads from the op of
    the other to its own. Outputs of one op are in the same generation.

    Args:
        tensors: tensors of one graph.
        within_ops: the ops that paths may lead through; all if None.

    Returns:
        The generations, the first without dependencies among `tensors`; in each,
        tensors keep the order in which they were given.

    Raises:
        ArgumentTypeError: an element of `tensors` is not a tensor of a graph.

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
    generation = _generations((t.op for t in unique_tensors), allowed)
    sorted_: dict[int, list[Tensor]] = {}
    for t in unique_tensors:
        sorted_.setdefault(generation[t.op], []).append(t)
    return [sorted_[number] for number in sorted(sorted_)]


def _generations(
    ends: Iterable[Operation], allowed: frozenset[Operation] | None
) -> dict[Operation, int]:
    """Return, for each op behind `ends`, how many of these a path to it can meet."""
    members = frozenset(ends)

    def behind(op: Operation) -> list[Operation]:
        producers = adjacency.predecessors(op)
        return [p for p in producers if p in members or allowed is None or p in allowed]

    generation_of: dict[Operation, int] = {}
    for op in adjacency.topological_sort(closure(members, behind)):
        longest = max((generation_of[p] for p in behind(op)), default=0)
        generation_of[op] = longest + (op in members)
    return generation_of


def format_ops(ops: Any, sort_outputs: bool = True) -> list[str]:
    """Return the names of ops and tensors, for printing.

    A tensor has the name of its op; anything else is converted to a string.

    Args:
        ops: an op, a tensor, or a flat iterable of them.
        sort_outputs: whether to sort the names.

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
    named = [e.op if types.is_tensor(e) else e for e in ops]
    names = [str(e.name) if types.is_op(e) else str(e) for e in named]
    return sorted(names) if sort_outputs else names
