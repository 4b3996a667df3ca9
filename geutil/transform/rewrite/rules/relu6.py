"""Relu6 -> Relu."""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Any, Op
from geutil.transform.rewrite.rule import Rule


def relu6_to_relu() -> Rule:
    """Return a rule that replaces each Relu6 by a Relu.

    The numbers change where an activation is above 6.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.negative(tf.nn.relu6(tf.zeros([2]), name="a/act"))
        >>> report = rewrite(graph, rules.relu6_to_relu())
        >>> y.op.inputs[0].name
        'a/Relu:0'
    """
    return Rule(Op("Relu6", Any("x")), _relu, name="relu6_to_relu")


def _relu(match: Match) -> Tensor:
    return tf.nn.relu(match["x"], name="Relu")
