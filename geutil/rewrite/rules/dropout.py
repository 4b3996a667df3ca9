"""Dropout and noise removal: at inference, neither does anything."""

from __future__ import annotations

import math

import numpy as np

from geutil.graph import op_types
from geutil.graph.types import Tensor
from geutil.rewrite.matcher import Match
from geutil.rewrite.patterns import Any, Const, Op, Optional, Pattern, constant_value
from geutil.rewrite.rule import Rule
from geutil.select.networks.layers import scalar_value

_ABOVE = frozenset({"Greater", "GreaterEqual"})
_BELOW = frozenset({"Less", "LessEqual"})
_DIVISIONS = frozenset({"DivNoNan", "RealDiv"})
_FORWARDING = op_types.FAKE_QUANT | {"Identity", "StopGradient"}
_TOLERANCE = 1e-2
"""How far scale * (1 - rate) may be from 1: half precision holds three digits."""


def dropout_removal() -> tuple[Rule, ...]:
    """Return rules that let dropout pass its input on.

    They know the ops that these build:

    - Keras 3 (`Dropout`, `SpatialDropout*` with training=True), `tf.nn.dropout`,
      `tf.nn.experimental.stateless_dropout` and `general_dropout`: `SelectV2(uniform >=
      rate, x * scale, 0)`;
    - earlier releases: `x * scale * Cast(uniform >= rate)`;
    - TensorFlow 1: `x / keep_prob * Floor(keep_prob + uniform)`;
    - stochastic depth: any product of `x`, a mask and a constant, where the mask is
      `Cast(uniform > rate)`, `Cast(uniform < keep_prob)` or the like, the `Floor`, or
      `SelectV2(uniform < keep_prob, 1, 0)`; and a `SelectV2` between `x` and 0 that is
      scaled before or behind, or whose mask is the `Floor`.

    `x / (1 - rate)` and `DivNoNan` may correspond to `x * scale`, a `LogicalNot` may
    turn a mask, and `uniform` may be shifted and scaled by constants to [0, 1).
    Identities, casts, reshapes of the mask and FakeQuant ops may lie in between.
    Refused where constants do not fit, so that the values that are kept would not be
    those at inference: `scale * (1 - rate)` is not 1, or `uniform` is not between 0 and
    1.

    The random ops stay without readers. In a function that is being traced, TensorFlow
    still runs those with a state, and the update of a Keras seed generator.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import rewrite, rules
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


def seen_through(pattern: Pattern, *more: str) -> Pattern:
    """Return a pattern of another, or of up to two ops that forward it."""
    kinds = _FORWARDING | {*more}
    once = Optional(Op(kinds, pattern, ...), pattern)
    return Optional(Op(kinds, once, ...), once)


def _select() -> Pattern:
    rate = Any("rate")
    return _chosen(rate, seen_through(_scaled(rate)), _zero())


def _chosen(rate: Pattern, kept: Pattern, zero: Pattern) -> Pattern:
    """Return the pattern of a choice between a kept value and zero."""
    keeps, drops = _decisions(rate)

    def select(mask: Pattern, first: Pattern, second: Pattern) -> Pattern:
        return Op(op_types.SELECTS, _spread(mask), first, second)

    return select(keeps, kept, zero) | select(drops, zero, kept)


def _decisions(rate: Pattern) -> tuple[Pattern, Pattern]:
    """Return the patterns of the masks of kept values, and of dropped ones."""
    drawn, likely = uniform(), _number("likely")
    above = Op(_ABOVE, drawn, rate) | Op(_BELOW, rate, drawn)
    below = Op(_BELOW, drawn, likely) | Op(_ABOVE, likely, drawn)
    dropped_below = Op(_BELOW, drawn, rate) | Op(_ABOVE, rate, drawn)
    dropped_above = Op(_ABOVE, drawn, likely) | Op(_BELOW, likely, drawn)
    keeps, drops = above | below, dropped_below | dropped_above
    floor = Op("Cast", _floored(likely))
    return keeps | floor | Op("LogicalNot", drops), drops | Op("LogicalNot", keeps)


def _floored(keep: Pattern) -> Pattern:
    total = Op(op_types.ADDITIONS, keep, uniform(), commutative=True)
    return Op("Floor", seen_through(total))


def _mask() -> Pattern:
    rate = Any("rate")
    mask = Op("GreaterEqual", uniform(), rate)
    scaled = seen_through(_scaled(rate))
    return Op("Mul", _spread(Op("Cast", mask)), scaled, commutative=True)


def _floor() -> Pattern:
    keep = Any("keep")
    scaled = seen_through(Op(_DIVISIONS, Any("x"), keep))
    return Op("Mul", _spread(_floored(keep)), scaled, commutative=True)


def _product() -> Pattern:
    """Return the pattern of x, a mask and a constant factor, in any order."""
    # The rarest op comes first, since the search begins with it. A larger constant
    # may be what the mask is put on.
    x, scale, keep = Any("x"), _number("scale"), _number("keep")
    rate = _number("rate")
    zero = _zero()
    # Another number is the scale.
    unit = seen_through(Const(where=lambda t: scalar_value(t) == 1.0), "Cast")
    decision = Op("Cast", _decisions(rate)[0])
    chosen = _chosen(rate, unit, zero)
    mask = _spread(decision | _floored(_number("likely")) | chosen)

    def times(a: Pattern, b: Pattern) -> Pattern:
        return Op("Mul", a, b, commutative=True)

    def scaled(t: Pattern) -> Pattern:
        return times(t, scale) | Op(_DIVISIONS, t, keep)

    return (
        times(mask, seen_through(scaled(x)))
        | scaled(seen_through(times(mask, x)))
        | times(_spread(scaled(mask)), x)
        | times(_spread(_chosen(rate, scale, zero)), x)
        | scaled(seen_through(_chosen(rate, x, zero)))
    )


def _spread(mask: Pattern) -> Pattern:
    """Return the pattern of a mask that may be given another shape or type."""
    return seen_through(mask, "BroadcastTo", "Cast", "ExpandDims", "Reshape")


def _number(name: str) -> Pattern:
    number = Const(name, where=lambda t: t.shape.num_elements() == 1)
    return seen_through(number, "Cast")


def _constant(name: str) -> Pattern:
    """Return the pattern of a constant, cast by Keras or not."""
    # Keras casts bounds that are given as integers, and where it computes in half
    # precision.
    return seen_through(Const(name), "Cast")


def _zero() -> Pattern:
    return _constant("zero") | Op("ZerosLike")


def _scaled(rate: Pattern) -> Pattern:
    """Return the pattern of x / (1 - rate)."""
    x = Any("x")
    keep = _constant("keep") | Op("Sub", _constant("one"), rate)
    scale = _constant("scale")
    return Op("Mul", x, scale, commutative=True) | Op(_DIVISIONS, x, keep)


def uniform() -> Pattern:
    """Return the pattern of random numbers, perhaps brought to an interval."""
    low = _constant("low")
    width = Op("Sub", _constant("high"), low) | _constant("width")
    drawn = seen_through(Op(op_types.UNIFORM_DRAWS))
    stretched = seen_through(Optional(Op("Mul", drawn, width, commutative=True), drawn))
    shifted = Optional(
        Op(op_types.ADDITIONS, stretched, low, commutative=True), stretched
    )
    cast = Op("Cast", shifted, where=lambda op: op.outputs[0].dtype.is_floating)
    return seen_through(Optional(cast))


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
        # The scale is computed from the very tensor that decides.
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


def noise_removal() -> tuple[Rule, ...]:
    """Return rules that let noise layers pass their input on.

    They know the ops that the Keras 3 layers build: `GaussianNoise` is x + normal,
    `GaussianDropout` x * normal around 1, and `AlphaDropout` a * (x * mask + p * (1 -
    mask)) + b. Refused: normal noise whose mean is not zero, and alpha dropout whose
    constants do not keep mean and variance.
    """
    noise = Op(op_types.ADDITIONS, Any("x"), _normal(), commutative=True)
    factor = Op("Mul", Any("x"), _normal(), commutative=True)
    return (
        Rule(noise, _input, lambda m: _off_mean(m, 0.0), "gaussian_noise"),
        Rule(factor, _input, lambda m: _off_mean(m, 1.0), "gaussian_dropout"),
        Rule(_alpha(), _input, _unfit_alpha, "alpha_dropout"),
    )


def _normal() -> Pattern:
    """Return the pattern of normal numbers with constant mean and deviation."""
    scaled = _times(seen_through(Op(op_types.NORMAL_DRAWS)), _plain("stddev"))
    return _plus(scaled, _plain("mean"))


def _alpha() -> Pattern:
    mask = seen_through(Op("Cast", Op("GreaterEqual", uniform(), Const("rate"))))
    dropped = seen_through(Op("Sub", _plain("one"), mask))
    mixed = _plus(_times(Any("x"), mask), _times(_plain("p"), dropped))
    return Op(
        op_types.ADDITIONS,
        _times(_plain("a"), mixed),
        _plain("b"),
        commutative=True,
    )


def _plain(name: str) -> Pattern:
    return seen_through(Const(name))


def _times(a: Pattern, b: Pattern) -> Pattern:
    return seen_through(Op("Mul", a, b, commutative=True))


def _plus(a: Pattern, b: Pattern) -> Pattern:
    return seen_through(Op(op_types.ADDITIONS, a, b, commutative=True))


def _off_mean(match: Match, expected: float) -> str | None:
    mean = _constant_of(match, "mean")
    if np.any(mean != expected):
        return (
            f"its mean is {mean}, not {expected:g}: taking it out would shift the rest"
        )
    return None


def _unfit_alpha(match: Match) -> str | None:
    values = [_constant_of(match, name) for name in ("rate", "p", "one", "a", "b")]
    if any(value.ndim for value in values):
        return "its constants are no scalars"
    rate, p, one, a, b = map(float, values)
    # Klambauer et al., Self-Normalizing Neural Networks, 2017, section 2.
    scale = 1.0 / math.sqrt((1.0 - rate) * (1.0 + rate * p * p)) if rate < 1 else 0.0
    close = all(
        math.isclose(x, y, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for x, y in ((one, 1.0), (a, scale), (b, -scale * p * rate))
    )
    if not close:
        return f"{a:g} and {b:g} do not balance a rate of {rate:g}"
    return None


def _constant_of(match: Match, name: str) -> np.ndarray:
    return np.asarray(constant_value(match[name]), np.float64)
