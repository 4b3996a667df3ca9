"""Rules that are often wanted. Each function makes a rule, or a group of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from geutil.graph.gradient_functions import ATTRIBUTE as GRADIENT
from geutil.graph.types import Tensor, is_reference
from geutil.rewrite.matcher import Match
from geutil.rewrite.patterns import Any as AnyPattern
from geutil.rewrite.patterns import Op, Pattern, Types
from geutil.rewrite.rule import Check, Rule
from geutil.rewrite.rules.constant_folding import constant_folding, dead_branch_folding
from geutil.rewrite.rules.dropout import dropout_removal

__all__ = [
    "constant_folding",
    "dead_branch_folding",
    "dropout_removal",
    "identity_elimination",
    "relu6_to_relu",
    "swap_op",
]


def swap_op(
    pattern: Pattern | Types,
    function: Callable[..., Any],
    check: Check | None = None,
    name: str | None = None,
) -> Rule:
    """Return a rule that puts the result of a function in the place of a match.

    Args:
        pattern: a pattern; or a type of op, several types, or a predicate on ops.
        function: builds the new tensors: one for each output of the root. For a
            pattern it gets the captures by keyword, None for those of an alternative
            that did not match; for a type the inputs of the op, in order.
        check: as in `Rule`.
        name: as in `Rule`; None is the name of the function.

    Raises:
        ArgumentTypeError, SelectionError: as `Rule`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import Any, Op, rewrite, rules
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
    # The rule compiles the pattern first, and reads the names when it is applied.
    names = list(dict.fromkeys(n.name for n in rule.compiled.nodes if n.name))
    return rule


def relu6_to_relu() -> Rule:
    """Return a rule that replaces each Relu6 by a Relu.

    The numbers change where an activation is above 6.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.negative(tf.nn.relu6(tf.zeros([2]), name="a/act"))
        >>> report = rewrite(graph, rules.relu6_to_relu())
        >>> y.op.inputs[0].name
        'a/Relu:0'
    """
    pattern = Op("Relu6", AnyPattern("x"))
    return Rule(pattern, lambda m: tf.nn.relu(m["x"], "Relu"), name="relu6_to_relu")


_CONTROL_FLOW = frozenset(
    f"{prefix}{kind}"
    for prefix in ("", "Ref")
    for kind in ("Switch", "Merge", "Enter", "Exit", "NextIteration")
)


def identity_elimination() -> Rule:
    """Return a rule that lets the readers of an Identity read its input.

    Refused where the Identity does more than pass a tensor on:

    - it waits for other ops, or reads a version 1 variable at a certain time;
    - it has a gradient of its own (`tf.Graph.gradient_override_map`);
    - it is part of version 1 control flow: its input comes from a Switch, Merge, Enter,
      Exit or NextIteration op, which says in which branch or loop it runs;
    - nobody reads it: it may be fetched.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.negative(tf.identity(x))
        >>> report = rewrite(graph, rules.identity_elimination())
        >>> y.op.inputs[0].name
        'x:0'
    """
    return Rule(
        Op("Identity", AnyPattern("x")),
        _input,
        _needed_for,
        name="identity_elimination",
    )


def _input(match: Match) -> Tensor:
    return match["x"]


def _needed_for(match: Match) -> str | None:
    op, tensor = match.root, match["x"]
    if op.control_inputs:
        return f"it waits for '{op.control_inputs[0].name}'"
    if is_reference(tensor):
        return f"it reads the variable '{tensor.name}' at a certain time"
    if tensor.op.type in _CONTROL_FLOW:
        return f"its input comes from '{tensor.op.name}', a {tensor.op.type}"
    if _has_gradient(match):
        return "it has a gradient of its own"
    if not op.outputs[0].consumers():
        return "nobody reads it, so it may be what is fetched"
    return None


def _has_gradient(match: Match) -> bool:
    try:
        match.root.get_attr(GRADIENT)
    except ValueError:
        return False
    return True
