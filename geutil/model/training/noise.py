"""Rules for noise that layers add in training, besides dropout.

They know what the Keras 3 layers build: `GaussianNoise` is x + normal,
`GaussianDropout` x * normal around 1, and `AlphaDropout`
a * (x * mask + p * (1 - mask)) + b.
"""

from __future__ import annotations

import math

import numpy as np

from geutil.graph.kinds import Tensor
from geutil.graph.op_types import ADDITIONS, UNIFORM_DRAWS
from geutil.transform.rewrite import (
    Any,
    Const,
    Match,
    Op,
    Optional,
    Pattern,
    Rule,
    constant_value,
)

_NORMAL = frozenset(
    (
        "RandomStandardNormal",
        "StatelessRandomNormal",
        "StatelessRandomNormalV2",
        "StatelessTruncatedNormal",
        "StatelessTruncatedNormalV2",
        "TruncatedNormal",
    )
)
_TOLERANCE = 1e-2
"""Half precision holds three digits."""


def noise_removal() -> tuple[Rule, ...]:
    """Return rules that let noise layers pass their input on.

    Refused: normal noise whose mean would change what it is put on, and alpha dropout
    whose constants do not keep mean and variance.
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
    scaled = Op("Mul", Op(_NORMAL), Const("stddev"), commutative=True)
    return Op(ADDITIONS, scaled, Const("mean"), commutative=True)


def _alpha() -> Pattern:
    drawn = Op(UNIFORM_DRAWS)
    stretched = Optional(
        Op("Mul", drawn, Op("Sub", Const(), Const()) | Const(), commutative=True), drawn
    )
    uniform = Optional(Op(ADDITIONS, stretched, Const(), commutative=True), stretched)
    mask = Op("Cast", Op("GreaterEqual", uniform, Const("rate")))
    passed = Op("Mul", Any("x"), mask, commutative=True)
    dropped = Op("Mul", Const("p"), Op("Sub", Const("one"), mask), commutative=True)
    mixed = Op(ADDITIONS, passed, dropped, commutative=True)
    scaled = Op("Mul", Const("a"), mixed, commutative=True)
    return Op(ADDITIONS, scaled, Const("b"), commutative=True)


def _input(match: Match) -> Tensor:
    return match["x"]


def _off_mean(match: Match, wanted: float) -> str | None:
    mean = _value(match, "mean")
    if np.any(mean != wanted):
        return f"its mean is {mean}, not {wanted:g}: taking it out would shift the rest"
    return None


def _unfit_alpha(match: Match) -> str | None:
    values = [_value(match, name) for name in ("rate", "p", "one", "a", "b")]
    if any(value.ndim for value in values):
        return "its constants are no scalars"
    rate, p, one, a, b = map(float, values)
    # Klambauer et al., Self-Normalizing Neural Networks, 2017, section 2.
    wanted = 1.0 / math.sqrt((1.0 - rate) * (1.0 + rate * p * p)) if rate < 1 else 0.0
    close = all(
        math.isclose(x, y, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for x, y in ((one, 1.0), (a, wanted), (b, -wanted * p * rate))
    )
    if not close:
        return f"{a:g} and {b:g} do not balance a rate of {rate:g}"
    return None


def _value(match: Match, name: str) -> np.ndarray:
    return np.asarray(constant_value(match[name]), np.float64)
