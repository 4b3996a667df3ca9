"""Noise removal: normal noise and alpha dropout, which do nothing at inference.

The rules know the ops that the Keras 3 layers build: `GaussianNoise` is x + normal,
`GaussianDropout` x * normal around 1, and `AlphaDropout` a * (x * mask + p * (1 -
mask)) + b.
"""

from __future__ import annotations

import math

import numpy as np

from geutil.graph.op_types import ADDITIONS, NORMAL_DRAWS
from geutil.graph.types import Tensor
from geutil.rewrite.compiling import Const, constant_value
from geutil.rewrite.matching import Match
from geutil.rewrite.patterns import Any, Op, Pattern
from geutil.rewrite.rule import Rule
from geutil.rewrite.rules.dropout import seen_through, uniform

_TOLERANCE = 1e-2
"""Half precision holds three digits."""


def noise_removal() -> tuple[Rule, ...]:
    """Return rules that let noise layers pass their input on.

    Refused: normal noise whose mean is not zero, and alpha dropout whose constants do
    not keep mean and variance.
    """
    return (
        Rule(_additive(), _input, lambda m: _off_mean(m, 0.0), "gaussian_noise"),
        Rule(_factor(), _input, lambda m: _off_mean(m, 1.0), "gaussian_dropout"),
        Rule(_alpha(), _input, _unfit_alpha, "alpha_dropout"),
    )


def _additive() -> Pattern:
    return Op(ADDITIONS, Any("x"), _normal(), commutative=True)


def _factor() -> Pattern:
    return Op("Mul", Any("x"), _normal(), commutative=True)


def _normal() -> Pattern:
    """Return the pattern of normal numbers with constant mean and deviation."""
    scaled = _product(seen_through(Op(NORMAL_DRAWS)), _constant("stddev"))
    return _sum(scaled, _constant("mean"))


def _alpha() -> Pattern:
    mask = seen_through(Op("Cast", Op("GreaterEqual", uniform(), Const("rate"))))
    dropped = seen_through(Op("Sub", _constant("one"), mask))
    mixed = _sum(_product(Any("x"), mask), _product(_constant("p"), dropped))
    return Op(
        ADDITIONS, _product(_constant("a"), mixed), _constant("b"), commutative=True
    )


def _constant(name: str) -> Pattern:
    return seen_through(Const(name))


def _product(a: Pattern, b: Pattern) -> Pattern:
    return seen_through(Op("Mul", a, b, commutative=True))


def _sum(a: Pattern, b: Pattern) -> Pattern:
    return seen_through(Op(ADDITIONS, a, b, commutative=True))


def _input(match: Match) -> Tensor:
    return match["x"]


def _off_mean(match: Match, expected: float) -> str | None:
    mean = _value(match, "mean")
    if np.any(mean != expected):
        return (
            f"its mean is {mean}, not {expected:g}: taking it out would shift the rest"
        )
    return None


def _unfit_alpha(match: Match) -> str | None:
    values = [_value(match, name) for name in ("rate", "p", "one", "a", "b")]
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


def _value(match: Match, name: str) -> np.ndarray:
    return np.asarray(constant_value(match[name]), np.float64)
