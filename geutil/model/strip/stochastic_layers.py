"""Dropout, noise and checks: layers that pass on their input at inference."""

from __future__ import annotations

from dataclasses import dataclass, field

from geutil.graph.op_types import is_random
from geutil.graph.types import Operation
from geutil.model.strip.options import StripOptions, keep_of
from geutil.model.strip.report import Stripped
from geutil.model.strip.side_effects import PASSING
from geutil.model.to_graph import Parts
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.rewrite import Any, Op, RewriteReport, Rule, rewrite
from geutil.transform.rewrite.rules.dropout import dropout_removal
from geutil.transform.rewrite.rules.noise import noise_removal

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
            if is_random(op.type):
                # The first input of stateless ops is the shape.
                is_stateless = op.type.startswith("Stateless")
                seeds += list(op.inputs)[1 if is_stateless else 0 :]
    if not seeds:
        return []
    behind = get_backward_walk_ops(seeds)
    return [t.op for op in behind for t in op.inputs if t.dtype.name == "resource"]
