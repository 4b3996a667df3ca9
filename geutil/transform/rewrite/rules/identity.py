"""Identity elimination."""

from __future__ import annotations

from geutil.graph.gradient_registry import ATTRIBUTE as GRADIENT
from geutil.graph.kinds import Tensor, is_reference
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Any, Op
from geutil.transform.rewrite.rule import Rule

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
    - it is part of version 1 control flow: its input comes from a Switch, Merge,
      Enter, Exit or NextIteration op, which says in which branch or loop it runs;
    - nobody reads it: it may be what is fetched.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.negative(tf.identity(x))
        >>> report = rewrite(graph, rules.identity_elimination())
        >>> y.op.inputs[0].name
        'x:0'
    """
    return Rule(
        Op("Identity", Any("x")), _input, _needed_for, name="identity_elimination"
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
