"""Dropout, noise and checks: layers that pass on their input at inference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.op_types import NORMAL_DRAWS, UNIFORM_DRAWS, is_random
from geutil.graph.types import Operation, Tensor
from geutil.model.strip.options import StripOptions, keep_of
from geutil.model.strip.report import Stripped
from geutil.model.strip.side_effects import PASSING
from geutil.model.to_graph import GraphParts
from geutil.rewrite import Any as AnyTensor
from geutil.rewrite import Match, Op, RewriteReport, Rule, rewrite
from geutil.rewrite.rules.dropout import dropout_removal
from geutil.rewrite.rules.noise import noise_removal
from geutil.select.walks import get_backward_walk_ops

_CHECK = "check"
_DROPOUT = "dropout_removal"


@dataclass
class Bypassed:
    """The ops that were bypassed."""

    entries: list[Stripped] = field(default_factory=list)
    # The ops that yield the handles of the variables which the random numbers of the
    # bypassed ops were seeded from.
    generators: list[Operation] = field(default_factory=list)


def set_neutral(parts: GraphParts, options: StripOptions) -> Bypassed:
    """Let ops yield the values that the caller gives for inference, in place."""
    if not options.neutral:
        return Bypassed()

    def is_named(op: Operation) -> bool:
        return op.name in options.neutral

    def replacement(match: Match) -> Tensor | str:
        return _neutral(match.root, options.neutral[match.root.name])

    rule = Rule(Op(is_named), replacement, name="neutral")
    report = rewrite(parts.graph, rule, keep=keep_of(parts))
    if report.refused:
        first = report.refused[0]
        raise ModelError(
            f"neutral: '{first.op}' cannot be {options.neutral[first.op]!r}: "
            f"{first.reason}"
        )
    done = {entry.op for entry in report.rewritten}
    entries = []
    for name, value in options.neutral.items():
        if name not in done:
            entries.append(Stripped("kept", "random", name, "no output needs it"))
            continue
        reason = (
            "an input passes through" if value is None else f"it is {value} from now"
        )
        if any(t.consumers() for t in parts.graph.get_operation_by_name(name).outputs):
            reason += "; it runs on for its shape, which is not known before"
        entries.append(Stripped("turned", "random", name, reason))
    return Bypassed(entries, _generators(parts, report))


def _neutral(op: Operation, value: Any) -> Tensor | str:
    """Return the result of an op at inference, or why there is none."""
    if len(op.outputs) != 1:
        return f"it has {len(op.outputs)} results; name an op with one"
    (result,) = op.outputs
    if value is None:
        for t in op.inputs:
            if t.dtype == result.dtype and t.shape.is_compatible_with(result.shape):
                return t
        return "no input has the type and the shape of its result; pass a number"
    try:
        number = tf.constant(value, result.dtype, [])
    except (TypeError, ValueError) as error:
        return f"its result is {result.dtype.name} ({error})"
    if result.shape.is_fully_defined():
        return tf.fill(result.shape, number)
    # Else the op goes on running, for its shape.
    draws = op.type in UNIFORM_DRAWS | NORMAL_DRAWS
    is_told = draws and not op.type.startswith("Stateful")
    return tf.fill(op.inputs[0] if is_told else tf.shape(result), number)


def bypass_layers(parts: GraphParts, options: StripOptions) -> Bypassed:
    """Let dropout, noise and checks pass on their input, in place."""
    check = Rule(
        Op(PASSING, AnyTensor("x"), ...), lambda match: match["x"], name=_CHECK
    )
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


def _generators(parts: GraphParts, report: RewriteReport) -> list[Operation]:
    """Return the handles that the seeds of bypassed random ops are read from."""
    seeds = []
    for done in report.rewritten:
        for name in done.ops:
            op = parts.graph.get_operation_by_name(name)
            if is_random(op.type):
                # The first input of stateless ops is the shape.
                is_stateless = op.type.startswith("Stateless")
                seeds += list(op.inputs)[1 if is_stateless else 0 :]
    if not seeds:
        return []
    behind = get_backward_walk_ops(seeds)
    return [t.op for op in behind for t in op.inputs if t.dtype.name == "resource"]
