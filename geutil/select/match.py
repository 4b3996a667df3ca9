"""Matching an op together with its neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from geutil.errors import SelectionError
from geutil.graph import adjacency, types
from geutil.graph.types import Operation, is_op, require_op, type_name
from geutil.select.conversions import make_regex

OpPredicate = Callable[[Operation], Any]


def op_type(op_types: str | Iterable[str], op: Operation | None = None) -> Any:
    """Return whether an op has one of several types.

    Args:
        op_types: one or more types, compared for equality.
        op: the op; if None, a predicate on ops is returned.

    Raises:
        ArgumentTypeError: `op` is neither None nor an op.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.add(1.0, 2.0)
        >>> ge.op_type("AddV2", x.op), ge.op_type("Add", x.op)
        (True, False)
    """
    type_names = frozenset((op_types,) if isinstance(op_types, str) else op_types)

    def matches(candidate: Operation) -> bool:
        require_op(candidate)
        return candidate.type in type_names

    return matches if op is None else matches(op)


class OpMatcher:
    """A predicate on an op, its producers, its consumers and its control inputs.

    Args:
        positive_filter: the condition on the op: a string is a regex that must match
            its whole name, or the part after the last slash ("Add" matches neither
            "AddN" nor "Add_1"); a compiled regex is searched in its name; an op matches
            itself; a predicate on ops is called; True matches any op.

    Raises:
        SelectionError: `positive_filter` is none of these.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        ...     z = tf.add(x, y, name="z")
        >>> ge.OpMatcher("z").input_ops("x", True)(z.op)
        True
        >>> ge.OpMatcher("z").input_ops("y", "x")(z.op)
        False
    """

    def __init__(self, positive_filter: Any) -> None:
        self.positive_filters: list[OpPredicate] = [_predicate(positive_filter)]
        self.input_op_matches: list[OpMatcher | None] | None = None
        self.control_input_op_matches: list[OpMatcher | None] | None = None
        self.output_op_matches: list[list[OpMatcher | None] | None] | None = None

    def __call__(self, op: Operation) -> bool:
        """Tell whether `op` and its neighbours match.

        Raises:
            ArgumentTypeError: `op` is no op.
        """
        require_op(op)
        return (
            all(passes(op) for passes in self.positive_filters)
            and _match_all([t.op for t in op.inputs], self.input_op_matches)
            and _match_all(adjacency.control_inputs(op), self.control_input_op_matches)
            and self._match_outputs(op)
        )

    def input_ops(self, *args: Any) -> OpMatcher:
        """Require these producers, one for each input; None means any.

        Raises:
            SelectionError: the producers are already set.
        """
        _check_unset(self.input_op_matches, "input_ops")
        self.input_op_matches = _matchers(args)
        return self

    def control_input_ops(self, *args: Any) -> OpMatcher:
        """Require these control inputs, in graph order; None means any.

        Raises:
            SelectionError: the control inputs are already set.
        """
        _check_unset(self.control_input_op_matches, "control_input_ops")
        self.control_input_op_matches = _matchers(args)
        return self

    def output_ops(self, *args: Any) -> OpMatcher:
        """Require these consumers: for each output one matcher, a list, or None.

        A list matches the consumers of the output in graph order; None means any number
        of any consumers.

        Raises:
            SelectionError: the consumers are already set.
        """
        _check_unset(self.output_op_matches, "output_ops")
        self.output_op_matches = [
            None if arg is None else _matchers(arg if isinstance(arg, list) else [arg])
            for arg in args
        ]
        return self

    def _match_outputs(self, op: Operation) -> bool:
        if self.output_op_matches is None:
            return True
        if len(op.outputs) != len(self.output_op_matches):
            return False
        return all(
            matchers is None or _match_all(adjacency.consumers(t), matchers)
            for t, matchers in zip(op.outputs, self.output_op_matches, strict=True)
        )


def _match_all(ops: list[Operation], matchers: list[OpMatcher | None] | None) -> bool:
    if matchers is None:
        return True
    return len(ops) == len(matchers) and all(
        matcher is None or matcher(op)
        for op, matcher in zip(ops, matchers, strict=True)
    )


def _matchers(args: Iterable[Any]) -> list[OpMatcher | None]:
    return [
        arg if arg is None or isinstance(arg, OpMatcher) else OpMatcher(arg)
        for arg in args
    ]


def _check_unset(matches: object, name: str) -> None:
    if matches is not None:
        raise SelectionError(
            f"{name} was called on this matcher already; make a new one"
        )


def _predicate(positive_filter: Any) -> OpPredicate:
    """Return the predicate that a regex, an op, a predicate or True corresponds to."""
    if isinstance(positive_filter, str):
        match = make_regex(positive_filter).fullmatch
        return lambda op: match(op.name) or match(types.scope_basename(op.name))
    if isinstance(positive_filter, re.Pattern):
        return lambda op: positive_filter.search(op.name)
    if is_op(positive_filter):
        return lambda op: op is positive_filter
    if positive_filter is True:
        return lambda op: True
    if callable(positive_filter):
        return positive_filter
    raise SelectionError(
        "expected a regex, a tf.Operation, a predicate or True, got "
        + type_name(positive_filter)
    )
