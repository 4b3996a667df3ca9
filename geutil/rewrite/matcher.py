"""Matches of a pattern in a graph, and why there is none: the nearest miss.

The search for a match at one op backtracks. A goal says that a node of the pattern
corresponds to a tensor or an op. Goals lie in a linked list; where a goal can be met in
several ways, the list for each further way goes onto a stack, with the number of
bindings made so far. A failure takes the next list from the stack and takes the
bindings since then back. Nothing recurses, neither over the graph nor over the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from geutil.errors import SelectionError
from geutil.graph import adjacency, types
from geutil.graph.edits import Liveness, Territory
from geutil.graph.types import Graph, Operation, Tensor
from geutil.rewrite.patterns import Any as AnyPattern
from geutil.rewrite.patterns import (
    Compiled,
    Leaf,
    Op,
    Or,
    Output,
    Pattern,
    compile_pattern,
)
from geutil.select.selections import graph_of_all, make_list_of_op


def _has_attribute(op: Operation, name: str, expected: Any) -> bool:
    """Return whether an attribute of `op` has a value, or passes a predicate."""
    try:
        value = op.get_attr(name)
    except ValueError:
        return False
    if callable(expected):
        return bool(expected(value))
    # TensorFlow returns text as bytes.
    if isinstance(value, bytes) and isinstance(expected, str):
        return value == expected.encode()
    # TensorFlow returns a list, which no tuple equals.
    if isinstance(expected, tuple):
        expected = list(expected)
    return bool(value == expected)


def _predicate_name(function: Any) -> str:
    """Return the name of a predicate, for messages."""
    return f"{getattr(function, '__name__', 'predicate')}()"


def _shown(expected: Any) -> str:
    """Return the expected value of an attribute, for messages."""
    return (
        f"what {_predicate_name(expected)} asks"
        if callable(expected)
        else repr(expected)
    )


_MAX_STEPS = 100_000
"""Goals that one search may take up; a pattern of a few ops needs some dozens."""


class _GoalKind(Enum):
    """The kinds of goals."""

    VALUE = auto()
    OP = auto()
    ANY_ORDER = auto()


_Goal: TypeAlias = tuple[_GoalKind, Any, Any]
_Agenda: TypeAlias = "tuple[_Goal, _Agenda] | None"
_Ways: TypeAlias = "list[tuple[_Goal, ...]] | None"
"""How a goal can be met: the goals that each way leaves; None is not at all."""
_Recorder: TypeAlias = Callable[[int, Pattern, Any, str], None]

_MET: list[tuple[_Goal, ...]] = [()]


class _PatternSearch:
    """Looks for a match of one pattern, at one op after another."""

    # `record` is told of every failure: the number of bindings before it, the node, the
    # op or tensor, and the failure.

    def __init__(
        self,
        compiled: Compiled,
        territory: Territory,
        record: _Recorder | None = None,
    ) -> None:
        self.compiled = compiled
        # After a search that succeeded, the element of each node, by `id`.
        self.bound: dict[int, Any] = {}
        self.names: dict[str, Any] = {}
        # True once a constraint (`where`, `only_consumer`, the territory) has failed
        # since the last call of `run`.
        self.constrained = False
        self._territory = territory
        self._record = record
        self._trail: list[tuple[int, str | None]] = []
        self._strict = True
        self._root: tuple[Operation, ...] = ()

    def run(self, op: Operation, *, strict: bool = True) -> bool:
        """Look for a match whose root is `op`."""
        self.bound, self.names, self._trail = {}, {}, []
        self.constrained, self._strict, self._root = False, strict, (op,)
        steps = 0
        stack: list[tuple[_Agenda, int]] = [
            (((_GoalKind.OP, root, op), None), 0)
            for root in reversed(self.compiled.roots)
        ]
        while stack:
            agenda, mark = stack.pop()
            self._take_back(mark)
            while agenda is not None:
                steps += 1
                if steps > _MAX_STEPS:
                    raise SelectionError(
                        f"the search for {self.compiled.pattern!r} at '{op.name}' took "
                        f"{_MAX_STEPS} steps; name fewer commutative inputs, or more "
                        "of what tells them apart"
                    )
                goal, agenda = agenda
                ways = self._ways(goal)
                if ways is None:
                    break
                # The first way is followed now; the others wait, the next one on top.
                stack.extend(
                    (_onto(way, agenda), len(self._trail)) for way in ways[:0:-1]
                )
                agenda = _onto(ways[0], agenda)
            else:
                if not strict or self._is_allowed(op):
                    return True
        return False

    def ops(self) -> tuple[Operation, ...]:
        """Return the ops that Op nodes correspond to, each once, the root first."""
        # Where alternatives share nodes, those of a later one come before its root.
        bound = (self.bound.get(id(node)) for node in self.compiled.ops)
        return tuple(dict.fromkeys([*self._root, *filter(None, bound)]))

    def objection(self, op: Operation) -> str | None:
        """Return the first constraint that the bound ops fail, or None."""
        for node in self.compiled.nodes:
            where = getattr(node, "where", None)
            if where and id(node) in self.bound:
                element = self.bound[id(node)]
                if not where(element):
                    return f"{_predicate_name(where)} is false for '{element.name}'"
        violation = self._outside_reader()
        if violation is not None:
            return f"{violation[0].describe()} asks for only_consumer: {violation[1]}"
        return self._territory.objection(op, self.ops())

    def _is_allowed(self, op: Operation) -> bool:
        violation = self._outside_reader()
        if violation is not None:
            node, reader = violation
            words = f"only_consumer: {reader}"
            self._fail(node, self.bound[id(node)], words, constraint=True)
            return False
        reason = self._territory.objection(op, self.ops())
        if reason is not None:
            self._fail(self.compiled.pattern, op, reason, constraint=True)
            return False
        return True

    def _outside_reader(self) -> tuple[Op, str] | None:
        for node in self.compiled.ops:
            if node.only_consumer and id(node) in self.bound:
                reason = self._territory.outside_reader(
                    self.bound[id(node)], self.ops()
                )
                if reason is not None:
                    return node, reason
        return None

    def _ways(self, goal: _Goal) -> _Ways:
        kind, node, element = goal
        if kind is _GoalKind.OP:
            return self._op(node, element)
        if kind is _GoalKind.ANY_ORDER:
            return self._any_order(node, element)
        return self._value(node, element)

    def _value(self, node: Pattern, tensor: Tensor) -> _Ways:
        """Return the goals that are left if a node corresponds to a tensor, or None."""
        if isinstance(node, Op):
            return self._output(node, 0, tensor)
        if isinstance(node, Output):
            return self._output(node.op, node.index, tensor)
        if isinstance(node, Leaf) and not node.accepts(tensor):
            return self._fail(
                node, tensor, "it comes from {kind}, not {0}", node.wanted
            )
        if isinstance(node, AnyPattern | Leaf):
            return _MET if self._bind(node, tensor) else None
        if isinstance(node, Or):
            # A choice that the pattern uses twice means one tensor.
            if not self._bind(node, tensor):
                return None
            ways: list[tuple[_Goal, ...]] = [
                ((_GoalKind.VALUE, child, tensor),)
                for child in node.alternatives
                if self._is_possible(child, tensor)
            ]
            return ways or None
        return self._fail(node, tensor, "{0} is no node of a pattern", type(node))

    def _output(self, node: Op, index: int, tensor: Tensor) -> _Ways:
        if tensor.value_index != index:
            return self._fail(
                node, tensor, "it is output {0}, not {1}", tensor.value_index, index
            )
        return self._op(node, tensor.op)

    def _op(self, node: Op, op: Operation) -> _Ways:
        """Return the goals that are left if a node corresponds to an op, or None."""
        if id(node) in self.bound:
            if self.bound[id(node)] is op:
                return _MET
            return self._fail(
                node, op, "the node stands for '{0}' already", self.bound[id(node)].name
            )
        if node.types is not None and op.type not in node.types:
            return self._fail(
                node, op, "its type is {kind}, not {0}", node.types_text()
            )
        if node.test is not None and not node.test(op):
            return self._fail(node, op, "{0} is false", _predicate_name(node.test))
        for name, expected in node.attrs.items():
            if not _has_attribute(op, name, expected):
                return self._fail(
                    node, op, "attribute '{0}' is not {1}", name, _shown(expected)
                )
        if not self._bind(node, op):
            return None
        return _MET if node.any_inputs else self._inputs(node, op)

    def _inputs(self, node: Op, op: Operation) -> _Ways:
        tensors, arity = tuple(op.inputs), len(node.inputs)
        if len(tensors) != arity and (not node.open_ended or len(tensors) < arity):
            return self._fail(
                node, op, "it has {0} inputs, not {1}", len(tensors), arity
            )
        if node.commutative:
            return [((_GoalKind.ANY_ORDER, node.inputs, tensors),)]
        pairs = zip(node.inputs, tensors, strict=False)
        return [tuple((_GoalKind.VALUE, child, tensor) for child, tensor in pairs)]

    def _any_order(
        self, nodes: tuple[Pattern, ...], tensors: tuple[Tensor, ...]
    ) -> _Ways:
        """Choose a tensor for the first of the nodes; the others follow."""
        if not nodes:
            return _MET
        ways: list[tuple[_Goal, ...]] = []
        tried: set[int] = set()
        for index, tensor in enumerate(tensors):
            # An op may read one tensor twice: to try it again would fail again.
            if id(tensor) not in tried and self._is_possible(nodes[0], tensor):
                tried.add(id(tensor))
                rest = tensors[:index] + tensors[index + 1 :]
                ways.append(
                    (
                        (_GoalKind.VALUE, nodes[0], tensor),
                        (_GoalKind.ANY_ORDER, nodes[1:], rest),
                    )
                )
        return ways or None

    def _is_possible(self, node: Pattern, tensor: Tensor) -> bool:
        """Return whether a node may correspond to a tensor by the type of its op."""
        kinds = self.compiled.types_of[id(node)]
        # The constraint that fails first names the nearest miss.
        return self._record is not None or kinds is None or tensor.op.type in kinds

    def _bind(self, node: Pattern, element: Any) -> bool:
        """Bind a node to an op or a tensor; refuse if it is bound to another."""
        before = self.bound.get(id(node))
        if before is not None:
            if before is not element:
                self._fail(
                    node, element, "the node stands for '{0}' already", before.name
                )
            return before is element
        name = node.name
        captured = None if name is None else self.names.get(name)
        if captured is not None and captured is not element:
            self._fail(node, element, "{0!r} names '{1}' already", name, captured.name)
            return False
        where = getattr(node, "where", None)
        if where is not None and self._strict and not where(element):
            words = "{0} is false"
            self._fail(node, element, words, _predicate_name(where), constraint=True)
            return False
        self.bound[id(node)] = element
        # The name goes with the binding that gave it, not with a later one.
        if name is not None and captured is None:
            self.names[name] = element
            self._trail.append((id(node), name))
        else:
            self._trail.append((id(node), None))
        return True

    def _take_back(self, mark: int) -> None:
        while len(self._trail) > mark:
            key, name = self._trail.pop()
            del self.bound[key]
            if name is not None:
                del self.names[name]

    def _fail(
        self,
        node: Pattern,
        element: Any,
        words: str,
        *parts: Any,
        constraint: bool = False,
    ) -> _Ways:
        """Note a failure; the words are put together only if somebody listens."""
        self.constrained = self.constrained or constraint
        if self._record is not None:
            op = element if types.is_op(element) else element.op
            text = words.format(*parts, kind=op.type) if parts else words
            self._record(len(self._trail), node, element, text)
        return None


def _onto(goals: tuple[_Goal, ...], agenda: _Agenda) -> _Agenda:
    for goal in reversed(goals):
        agenda = (goal, agenda)
    return agenda


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
        self._search = _PatternSearch(compiled, territory)

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
        if not _is_anchor(compiled, op) or liveness.is_retired(op):
            continue
        candidate = finder.find(op, producer_types(op))
        if isinstance(candidate, Match) and (
            overlaps or matched_ops.isdisjoint(candidate.ops)
        ):
            matches.append(candidate)
            matched_ops.update(candidate.ops)
    return matches[::-1]


def _is_anchor(compiled: Compiled, op: Operation) -> bool:
    """Return whether the type of `op` is one that the root may have."""
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
        self.search: _PatternSearch | None = None
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
    search = _PatternSearch(compiled, Territory(graph, liveness), nearest.record)
    nearest.search = search
    if search.run(op):
        return Explanation(op, Match(op, search.ops(), search.names, search.bound))
    node, element, reason = nearest.failure
    return Explanation(op, None, nearest.reached, node, element, reason)
