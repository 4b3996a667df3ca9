"""Errors of gradients whose tensors were encoded, measured on a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.gradients.api import gradients
from geutil.gradients.choices import BFLOAT16
from geutil.graph.types import Tensor


@dataclass(frozen=True)
class GradientError:
    """How far a gradient is from that of `tf.gradients`.

    Attributes:
        name: the name of what it is the gradient by.
        relative: the Euclidean norm of the difference, over that of the gradient.
        largest: the largest difference of an element, over the largest element.
    """

    name: str
    relative: float
    largest: float


def encoding_errors(
    loss: Callable[..., Any], xs: Sequence[Any], *batch: Any, **options: Any
) -> tuple[GradientError, ...]:
    """Return how far each gradient is off with `encode="bfloat16"`, on one batch.

    Both kinds of gradients are computed behind the same forward pass, which runs once,
    with its effects: moving averages move, and dropout draws.

    Args:
        loss: computes what is differentiated from a batch.
        xs: variables, the same in each call.
        *batch: tensors or arrays.
        **options: those of `gradients`; `encode` is "bfloat16" unless given, and
            `checkpoints` is None.

    Returns:
        An error for each x that the loss depends on.

    Raises:
        Whatever `gradients` raises.

    Cost: two backward passes.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import encoding_errors
        >>> w = tf.Variable(tf.random.stateless_normal([64, 64], (1, 2)) / 8, name="w")
        >>> def loss(x):
        ...     return tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x @ w) @ w)))
        >>> (error,) = encoding_errors(loss, [w], tf.ones([32, 64]))
        >>> error.name, 0 < error.relative < 0.01
        ('w:0', True)
    """
    options = {"encode": BFLOAT16, "checkpoints": None, **options, "order": False}
    sources = list(xs)

    @tf.function(autograph=False)
    def compare(*args: Any) -> list[Any]:
        value = loss(*args)
        plain = tf.gradients(value, sources)
        encoded = gradients(value, sources, **options)
        return [
            None if p is None else _differences(tf.convert_to_tensor(p), e)
            for p, e in zip(plain, encoded, strict=True)
        ]

    compared = compare(*map(tf.convert_to_tensor, batch))
    return tuple(
        GradientError(x.name, *(float(number) for number in numbers))
        for x, numbers in zip(sources, compared, strict=True)
        if numbers is not None
    )


def _differences(plain: Tensor, encoded: Any) -> tuple[Tensor, Tensor]:
    """Return the norm and the largest element of a difference, as parts."""
    difference = tf.convert_to_tensor(encoded) - plain
    relative = tf.math.divide_no_nan(tf.norm(difference), tf.norm(plain))
    largest = (tf.reduce_max(tf.abs(t)) for t in (difference, plain))
    return relative, tf.math.divide_no_nan(*largest)
