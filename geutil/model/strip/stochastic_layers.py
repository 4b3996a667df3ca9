"""Dropout, noise and checks: layers that pass on their input at inference.

They know what the Keras 3 layers build: `GaussianNoise` is x + normal,
`GaussianDropout` x * normal around 1, and `AlphaDropout`
a * (x * mask + p * (1 - mask)) + b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from geutil.graph.op_types import ADDITIONS, UNIFORM_DRAWS
from geutil.graph.types import Operation, Tensor
from geutil.model.strip.options import StripOptions, keep_of
from geutil.model.strip.report import Stripped
from geutil.model.strip.side_effects import PASSING, is_random
from geutil.model.to_graph import Parts
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.rewrite import (
    Any,
    Const,
    Match,
    Op,
    Optional,
    Pattern,
    RewriteReport,
    Rule,
    constant_value,
    rewrite,
)
from geutil.transform.rewrite.rules import dropout_removal

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


_CHECK = "check"
_DROPOUT = "dropout_removal"


@dataclass
class Bypassed:
    """What was bypassed.

    Attributes:
        entries: for the report.
        generators: the ops that yield the handles of the variables which the random
            numbers of the bypassed ops were seeded from.
    """

    entries: list[Stripped] = field(default_factory=list)
    generators: list[Operation] = field(default_factory=list)


def bypass_layers(parts: Parts, options: StripOptions) -> Bypassed:
    """Let dropout, noise and checks pass on what they get, in place.

    Cost: as `geutil.transform.rewrite.rewrite`.
    """
    check = Rule(Op(PASSING, Any("x"), ...), lambda match: match["x"], name=_CHECK)
    rules = (dropout_removal(), noise_removal(), check)
    retained_ops = [op for op in parts.graph.get_operations() if options.keeps(op.name)]
    report = rewrite(parts.graph, rules, keep=[*keep_of(parts), *retained_ops])
    bypassed = Bypassed(generators=_generators(parts, report))
    for done in report.rewritten:
        reason = "what it gets passes through unchanged"
        bypassed.entries.append(Stripped("removed", _kind(done.rule), done.op, reason))
    for refused in report.refused:
        bypassed.entries.append(
            Stripped("kept", _kind(refused.rule), refused.op, refused.reason)
        )
    return bypassed


def _kind(rule: str) -> str:
    if rule == _CHECK:
        return "diagnostic"
    return "dropout" if rule.startswith(_DROPOUT) else "noise"


def _generators(parts: Parts, report: RewriteReport) -> list[Operation]:
    """Return the handles that the seeds of bypassed random ops are read from."""
    seeds = []
    for done in report.rewritten:
        for name in done.ops:
            op = parts.graph.get_operation_by_name(name)
            if is_random(op.node_def):
                # The first input of stateless ops is the shape.
                is_stateless = op.type.startswith("Stateless")
                seeds += list(op.inputs)[1 if is_stateless else 0 :]
    if not seeds:
        return []
    behind = get_backward_walk_ops(seeds)
    return [t.op for op in behind for t in op.inputs if t.dtype.name == "resource"]
