"""Swapping what a pattern finds for what a Python function builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Op, Pattern, Types
from geutil.transform.rewrite.rule import Check, Rule


def swap_op(
    pattern: Pattern | Types,
    function: Callable[..., Any],
    check: Check | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that puts the result of a function in the place of a match.

    Args:
        pattern: a pattern; or a type of op, several types, or a predicate on ops.
        function: builds the new tensors: one for each output of the root. Of a pattern
            it gets what is captured, by keyword, and None for what an alternative that
            was not taken would have captured. Of a type it gets the inputs of the op,
            in order.
        check: as in `Rule`.
        name: as in `Rule`; None is the name of the function.

    Raises:
        ArgumentTypeError, SelectionError: as `Rule`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import Any, Op, rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.negative(tf.sqrt(tf.exp(x, name="e"), name="s"))
        >>> halved = lambda x: tf.exp(x / 2.0, name="half")
        >>> sqrt_of_exp = Op("Sqrt", Op("Exp", Any("x")))
        >>> report = rewrite(graph, rules.swap_op(sqrt_of_exp, halved))
        >>> y.op.inputs[0].name
        'half:0'
    """
    title = name or str(getattr(function, "__name__", "swap_op"))
    if not isinstance(pattern, Pattern):

        def from_inputs(match: Match) -> Any:
            return function(*match.root.inputs)

        return Rule(Op(pattern), from_inputs, check, title)

    def from_captures(match: Match) -> Any:
        return function(**{name: match.get(name) for name in names})

    rule = Rule(pattern, from_captures, check, title)
    names = list(dict.fromkeys(n.name for n in rule.compiled.nodes if n.name))
    return rule
