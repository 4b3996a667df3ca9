"""Dropout removal: what dropout does at inference, which is nothing."""

from __future__ import annotations

import numpy as np

from geutil.graph.op_types import ADDITIONS, UNIFORM_DRAWS
from geutil.graph.types import Tensor
from geutil.transform.rewrite.compiling import Const, constant_value
from geutil.transform.rewrite.matching import Match
from geutil.transform.rewrite.patterns import Any, Op, Optional, Pattern
from geutil.transform.rewrite.rule import Rule

_ABOVE = frozenset({"Greater", "GreaterEqual"})
_BELOW = frozenset({"Less", "LessEqual"})
_TOLERANCE = 1e-2
"""How far scale * (1 - rate) may be from 1: half precision holds three digits."""


def dropout_removal() -> tuple[Rule, ...]:
    """Return rules that let dropout pass its input on.

    They know what these build:

    - Keras 3 (`Dropout`, `SpatialDropout*` with training=True), `tf.nn.dropout`,
      `tf.nn.experimental.stateless_dropout` and `general_dropout`:
      `SelectV2(uniform >= rate, x * scale, 0)`;
    - earlier releases: `x * scale * Cast(uniform >= rate)`;
    - TensorFlow 1: `x / keep_prob * Floor(keep_prob + uniform)`;
    - stochastic depth: any product of `x`, a mask and a constant, where the mask is
      `Cast(uniform > rate)`, `Cast(uniform < keep_prob)` or the like, or the `Floor`.

    `x / (1 - rate)` may stand for `x * scale`, and `uniform` may be shifted and scaled
    by constants to [0, 1). Refused where constants do not fit, so that the values that
    are kept would not be those at inference: `scale * (1 - rate)` is not 1, or
    `uniform` is not between 0 and 1.

    The random ops stay without readers. In a function that is being traced, TensorFlow
    still runs those with a state, and the update of a Keras seed generator.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.ones([8], name="x")
        ...     y = tf.negative(tf.nn.dropout(x, rate=0.5))
        >>> report = rewrite(graph, rules.dropout_removal())
        >>> y.op.inputs[0].name
        'x:0'
    """
    return (
        Rule(_select(), _input, _unfit, "dropout_removal"),
        Rule(_mask(), _input, _unfit, "dropout_removal (mask)"),
        Rule(_floor(), _input, _unfit, "dropout_removal (floor)"),
        Rule(_product(), _input, _unfit, "dropout_removal (product)"),
    )


def _select() -> Pattern:
    rate, likely, drawn = Any("rate"), _number("likely"), _uniform()
    zero = _constant("zero")
    above = Op(_ABOVE, drawn, rate) | Op(_BELOW, rate, drawn)
    below = Op(_BELOW, drawn, likely) | Op(_ABOVE, likely, drawn)
    dropped_below = Op(_BELOW, drawn, rate) | Op(_ABOVE, rate, drawn)
    dropped_above = Op(_ABOVE, drawn, likely) | Op(_BELOW, likely, drawn)
    kept, dropped = above | below, dropped_below | dropped_above

    def select(mask: Pattern, first: Pattern, second: Pattern) -> Pattern:
        return Op({"Select", "SelectV2"}, mask, first, second)

    scaled = _scaled(rate)
    return select(kept, scaled, zero) | select(dropped, zero, scaled)


def _mask() -> Pattern:
    rate = Any("rate")
    mask = Op("GreaterEqual", _uniform(), rate)
    return Op("Mul", _scaled(rate), Op("Cast", mask), commutative=True)


def _floor() -> Pattern:
    keep = Any("keep")
    mask = Op("Floor", Op(ADDITIONS, keep, _uniform(), commutative=True))
    scaled = Op("RealDiv", Any("x"), keep)
    return Op("Mul", scaled, mask, commutative=True)


def _product() -> Pattern:
    """Return the pattern of x, a mask and a constant factor, in any order."""
    # A larger one may be what the mask is put on.
    x, scale, keep = Any("x"), _number("scale"), _number("keep")
    rate, likely = _number("rate"), _number("likely")
    drawn = _uniform()
    above = Op(_ABOVE, drawn, rate) | Op(_BELOW, rate, drawn)
    below = Op(_BELOW, drawn, likely) | Op(_ABOVE, likely, drawn)
    floor = Op("Floor", Op(ADDITIONS, likely, drawn, commutative=True))
    mask = Op("Cast", above | below) | floor

    def times(a: Pattern, b: Pattern) -> Pattern:
        return Op("Mul", a, b, commutative=True)

    def scaled(t: Pattern) -> Pattern:
        return times(t, scale) | Op("RealDiv", t, keep)

    return times(scaled(x), mask) | scaled(times(x, mask)) | times(x, scaled(mask))


def _number(name: str) -> Pattern:
    number = Const(name, where=lambda t: t.shape.num_elements() == 1)
    return number | Op("Cast", number)


def _constant(name: str) -> Pattern:
    """Return the pattern of a constant; Keras casts bounds that are given as integers.

    Also where it computes in half precision.
    """
    constant = Const(name)
    return constant | Op("Cast", constant)


def _scaled(rate: Pattern) -> Pattern:
    """Return the pattern of x / (1 - rate)."""
    x = Any("x")
    keep = _constant("keep") | Op("Sub", _constant("one"), rate)
    return Op("Mul", x, _constant("scale"), commutative=True) | Op("RealDiv", x, keep)


def _uniform() -> Pattern:
    """Return the pattern of random numbers, perhaps brought to an interval."""
    low = _constant("low")
    width = Op("Sub", _constant("high"), low) | _constant("width")
    drawn = Op(UNIFORM_DRAWS)
    stretched = Optional(Op("Mul", drawn, width, commutative=True), drawn)
    return Optional(Op(ADDITIONS, stretched, low, commutative=True), stretched)


def _input(match: Match) -> Tensor:
    return match["x"]


def _unfit(match: Match) -> str | None:
    for name, expected in (("zero", 0.0), ("one", 1.0), ("low", 0.0)):
        value = _value(match, name)
        if value is not None and np.any(value != expected):
            return f"'{match[name].name}' is {value}, not {expected:g}"
    high = _value(match, "high", _value(match, "width"))
    if high is not None and np.any(high != 1.0):
        return f"the random numbers go up to {high}, not 1"
    return _unfit_scale(match)


def _unfit_scale(match: Match) -> str | None:
    """Return why the values that dropout keeps do not balance those it drops."""
    likely, scale = _value(match, "likely"), _value(match, "scale")
    if "one" in match or ("rate" not in match and likely is None):
        # What scales is computed from the very tensor that decides.
        return None
    rate = _value(match, "rate") if likely is None else 1.0 - likely
    if rate is None:
        return f"'{match['rate'].name}' is no constant, but what scales is"
    if scale is None:
        scale = 1.0 / constant_value(match["keep"])
    product = scale * (1.0 - rate)
    if np.any(np.abs(product - 1.0) > _TOLERANCE):
        return f"what is kept is scaled by {scale}, with a rate of {rate}"
    return None


def _value(
    match: Match, name: str, default: np.ndarray | None = None
) -> np.ndarray | None:
    """Return the value of a capture in double precision, if it is a constant."""
    tensor = match.get(name)
    if tensor is None or not Const().accepts(tensor):
        return default
    return np.asarray(constant_value(tensor), np.float64)
