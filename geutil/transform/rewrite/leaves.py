"""Leaves of patterns that say where a tensor comes from: constants and variables."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import tensorflow as tf

from geutil.errors import SelectionError
from geutil.graph.kinds import Operation, Tensor
from geutil.transform.rewrite.patterns import Pattern, TensorTest, check_name

MAX_IDENTITIES = 8
"""How many Identity ops in a row a leaf looks through. A frozen graph has one."""


class Leaf(Pattern):
    """A tensor whose origin matters. What it captures is the tensor that is read.

    The op behind it is not part of the match: matches that share it do not overlap.

    Args:
        name: captures the tensor.
        where: a predicate that the tensor must pass.
        through_identity: whether up to eight Identity ops may stand between the
            origin and the reader, as in frozen graphs (Const -> Identity).
    """

    wanted: ClassVar[str]
    origins: ClassVar[frozenset[str]]

    def __init__(
        self,
        name: str | None = None,
        *,
        where: TensorTest | None = None,
        through_identity: bool = True,
    ) -> None:
        check_name(name)
        self.name = name
        self.where = where
        self.through_identity = through_identity

    def accepts(self, tensor: Tensor) -> bool:
        """Tell whether the tensor has such an origin."""
        origin = origin_of(tensor) if self.through_identity else tensor.op
        return origin.type in self.origins


class Const(Leaf):
    """A constant. `constant_value(match["w"])` is its value.

    Example:
        >>> from geutil.transform.rewrite import Const
        >>> Const("w")
        Const('w')
    """

    wanted = "a constant"
    origins = frozenset({"Const"})


class Variable(Leaf):
    """What a variable holds: a ReadVariableOp, or the reference of a v1 variable.

    Example:
        >>> from geutil.transform.rewrite import Variable
        >>> Variable("moving_mean")
        Variable('moving_mean')
    """

    wanted = "the value of a variable"
    origins = frozenset({"ReadVariableOp", "Variable", "VariableV2"})


class Weight(Leaf):
    """A constant or what a variable holds: a weight, frozen or not.

    Example:
        >>> from geutil.transform.rewrite import Weight
        >>> Weight("kernel")
        Weight('kernel')
    """

    wanted = "a constant or the value of a variable"
    origins = Const.origins | Variable.origins


def origin_of(tensor: Tensor) -> Operation:
    """Return the op behind a tensor, up to eight Identity ops looked through."""
    op = tensor.op
    for _ in range(MAX_IDENTITIES):
        if op.type != "Identity":
            break
        op = op.inputs[0].op
    return op


def constant_value(tensor: Tensor) -> np.ndarray:
    """Return the value of a tensor that the pattern `Const` accepts.

    Args:
        tensor: a tensor of a graph.

    Raises:
        SelectionError: it is no constant.

    Cost: that of copying the value.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import constant_value
        >>> with tf.Graph().as_default():
        ...     x = tf.identity(tf.constant([1.0, 2.0]))
        >>> constant_value(x)
        array([1., 2.], dtype=float32)
    """
    origin = origin_of(tensor)
    if origin.type != "Const":
        raise SelectionError(
            f"'{tensor.name}' is no constant: it comes from '{origin.name}', a "
            f"{origin.type}; ask for Const() in the pattern"
        )
    value: np.ndarray = tf.make_ndarray(origin.get_attr("value"))
    return value
