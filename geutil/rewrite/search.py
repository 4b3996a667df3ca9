"""The search for a match at one op.

Backtracking, with conditions, within one region of the graph.

A goal says that a node of the pattern corresponds to a tensor or an op. Goals lie in a
linked list; where a goal can be met in several ways, the list for each further way goes
onto a stack, with the number of bindings made so far. A failure takes the next list
from the stack and takes the bindings since then back. Nothing recurses, neither over
the graph nor over the pattern.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from geutil.errors import SelectionError
from geutil.graph import types
from geutil.graph.types import Operation, Tensor
from geutil.rewrite.compiling import Compiled, Leaf
from geutil.rewrite.liveness import Territory
from geutil.rewrite.patterns import Any as AnyPattern
from geutil.rewrite.patterns import Op, Or, Output, Pattern


def has_attribute(op: Operation, name: str, expected: Any) -> bool:
    """Tell whether an attribute of `op` has a value, or passes a predicate."""
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


def predicate_name(function: Any) -> str:
    """Return the name of a predicate, for messages."""
    return f"{getattr(function, '__name__', 'predicate')}()"


def shown(expected: Any) -> str:
    """Return the expected value of an attribute, for messages."""
    return (
        f"what {predicate_name(expected)} asks"
        if callable(expected)
        else repr(expected)
    )


MAX_STEPS = 100_000
"""Goals that one search may take up; a pattern of a few ops needs some dozens."""


class GoalKind(Enum):
    """The kinds of goals."""

    VALUE = auto()
    OP = auto()
    ANY_ORDER = auto()


Goal: typing.TypeAlias = tuple[GoalKind, typing.Any, typing.Any]
Agenda: typing.TypeAlias = "tuple[Goal, Agenda] | None"
Ways: typing.TypeAlias = "list[tuple[Goal, ...]] | None"
"""How a goal can be met: the goals that each way leaves; None is not at all."""
Recorder: typing.TypeAlias = Callable[[int, Pattern, typing.Any, str], None]

_MET: list[tuple[Goal, ...]] = [()]


class PatternSearch:
    """Looks for a match of one pattern, at one op after another."""

    # `record` is told of every failure: the number of bindings before it, the node, the
    # op or tensor, and the failure.

    def __init__(
        self,
        compiled: Compiled,
        territory: Territory,
        record: Recorder | None = None,
    ) -> None:
        self.compiled = compiled
        # After a search that succeeded, the element of each node, by `id`.
        self.bound: dict[int, typing.Any] = {}
        self.names: dict[str, typing.Any] = {}
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
        stack: list[tuple[Agenda, int]] = [
            (((GoalKind.OP, root, op), None), 0)
            for root in reversed(self.compiled.roots)
        ]
        while stack:
            agenda, mark = stack.pop()
            self._take_back(mark)
            while agenda is not None:
                steps += 1
                if steps > MAX_STEPS:
                    raise SelectionError(
                        f"the search for {self.compiled.pattern!r} at '{op.name}' took "
                        f"{MAX_STEPS} steps; name fewer commutative inputs, or more of "
                        "what tells them apart"
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
                    return f"{predicate_name(where)} is false for '{element.name}'"
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

    def _ways(self, goal: Goal) -> Ways:
        kind, node, element = goal
        if kind is GoalKind.OP:
            return self._op(node, element)
        if kind is GoalKind.ANY_ORDER:
            return self._any_order(node, element)
        return self._value(node, element)

    def _value(self, node: Pattern, tensor: Tensor) -> Ways:
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
            ways: list[tuple[Goal, ...]] = [
                ((GoalKind.VALUE, child, tensor),)
                for child in node.alternatives
                if self._is_possible(child, tensor)
            ]
            return ways or None
        return self._fail(node, tensor, "{0} is no node of a pattern", type(node))

    def _output(self, node: Op, index: int, tensor: Tensor) -> Ways:
        if tensor.value_index != index:
            return self._fail(
                node, tensor, "it is output {0}, not {1}", tensor.value_index, index
            )
        return self._op(node, tensor.op)

    def _op(self, node: Op, op: Operation) -> Ways:
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
            return self._fail(node, op, "{0} is false", predicate_name(node.test))
        for name, expected in node.attrs.items():
            if not has_attribute(op, name, expected):
                return self._fail(
                    node, op, "attribute '{0}' is not {1}", name, shown(expected)
                )
        if not self._bind(node, op):
            return None
        return _MET if node.any_inputs else self._inputs(node, op)

    def _inputs(self, node: Op, op: Operation) -> Ways:
        tensors, arity = tuple(op.inputs), len(node.inputs)
        if len(tensors) != arity and (not node.open_ended or len(tensors) < arity):
            return self._fail(
                node, op, "it has {0} inputs, not {1}", len(tensors), arity
            )
        if node.commutative:
            return [((GoalKind.ANY_ORDER, node.inputs, tensors),)]
        pairs = zip(node.inputs, tensors, strict=False)
        return [tuple((GoalKind.VALUE, child, tensor) for child, tensor in pairs)]

    def _any_order(
        self, nodes: tuple[Pattern, ...], tensors: tuple[Tensor, ...]
    ) -> Ways:
        """Choose a tensor for the first of the nodes; the others follow."""
        if not nodes:
            return _MET
        ways: list[tuple[Goal, ...]] = []
        tried: set[int] = set()
        for index, tensor in enumerate(tensors):
            # An op may read one tensor twice: to try it again would fail again.
            if id(tensor) not in tried and self._is_possible(nodes[0], tensor):
                tried.add(id(tensor))
                rest = tensors[:index] + tensors[index + 1 :]
                ways.append(
                    (
                        (GoalKind.VALUE, nodes[0], tensor),
                        (GoalKind.ANY_ORDER, nodes[1:], rest),
                    )
                )
        return ways or None

    def _is_possible(self, node: Pattern, tensor: Tensor) -> bool:
        """Tell whether a node may correspond to a tensor by the type of its op."""
        kinds = self.compiled.types_of[id(node)]
        # The constraint that fails first names the nearest miss.
        return self._record is not None or kinds is None or tensor.op.type in kinds

    def _bind(self, node: Pattern, element: typing.Any) -> bool:
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
            self._fail(node, element, words, predicate_name(where), constraint=True)
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
        element: typing.Any,
        words: str,
        *parts: typing.Any,
        constraint: bool = False,
    ) -> Ways:
        """Note a failure; the words are put together only if somebody listens."""
        self.constrained = self.constrained or constraint
        if self._record is not None:
            op = element if types.is_op(element) else element.op
            text = words.format(*parts, kind=op.type) if parts else words
            self._record(len(self._trail), node, element, text)
        return None


def _onto(goals: tuple[Goal, ...], agenda: Agenda) -> Agenda:
    for goal in reversed(goals):
        agenda = (goal, agenda)
    return agenda
