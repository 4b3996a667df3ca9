"""Names of FakeQuant ops and of their ranges.

A name says where in the network a range belongs: `<context>/<slot>`, as in
`block1/conv/weights_quant`. The context is the name scope of the op, or its whole name
where several ops of a scope need the slot. Names do not depend on the order in which
ops were made, nor on what was skipped by an override: a graph for training and one for
inference that were made by the same code have the same ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Operation
from geutil.graph.names import scope_basename, scope_dirname
from geutil.quantize.finding.drafts import Draft
from geutil.quantize.finding.network import Network
from geutil.quantize.finding.points import Point, RangeGroup, SharedRanges

_FOLD = "_fold"
"""What batch-norm folding puts behind the names of the ops it makes."""


def named(
    drafts: Sequence[Draft], network: Network, shared: SharedRanges
) -> tuple[list[RangeGroup], MutableIdentityMap[Point]]:
    """Return the ranges, and the point of each tensor.

    Args:
        drafts: the points without names.
        network: the network that they are in.
        shared: which activations share a range.
    """
    ordered = sorted(drafts, key=lambda d: network.place.get(d.tensor.op, -1))
    groups: MutableIdentityMap[RangeGroup] = MutableIdentityMap()
    points: MutableIdentityMap[Point] = MutableIdentityMap()
    for draft, name in zip(ordered, _names(ordered), strict=True):
        key = shared.root(draft.tensor) if draft.weights is None else draft.weights
        group = groups.get(key)
        if group is None:
            group = groups[key] = _group(draft, name)
        elif draft.weights is not None and draft.form != group.form:
            # Layers that want channels along other axes share one range.
            group.form = replace(group.form, axes=())
        point = Point(
            draft.tensor, name, group, draft.readers, draft.counts, draft.shapes
        )
        group.points.append(point)
        points[draft.tensor] = point
        if draft.counts:
            _take_in(group, draft, name)
    for group in groups.values():
        if not group.sources:
            # What is joined or pooled was quantized before, in a range of its own.
            group.points[0].counts = True
    return list(groups.values()), points


def _group(draft: Draft, name: str) -> RangeGroup:
    return RangeGroup(
        name,
        draft.form,
        draft.weights is not None,
        draft.spec.ema_decay or 0.0,
        draft.initial,
        draft.fixed,
    )


def _take_in(group: RangeGroup, draft: Draft, name: str) -> None:
    """Let a range hold what one more tensor starts with."""
    if len(group.sources) == 1:
        group.name, group.initial, group.fixed = name, draft.initial, draft.fixed
    low, high = group.initial
    group.initial = min(low, draft.initial[0]), max(high, draft.initial[1])


def _names(drafts: Sequence[Draft]) -> list[str]:
    wanted = [f"{_scope(draft.anchor)}{draft.slot}" for draft in drafts]
    often = Counter(wanted)
    names = [
        f"{_bare(draft.anchor.name)}/{draft.slot}" if often[name] > 1 else name
        for draft, name in zip(drafts, wanted, strict=True)
    ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        if seen[name]:
            names[index] = f"{name}_{seen[name]}"
        seen[name] += 1
    return names


def _scope(op: Operation) -> str:
    return scope_dirname(op.name) or f"{_bare(op.name)}/"


def _bare(name: str) -> str:
    base = scope_basename(name)
    return scope_dirname(name) + base.removesuffix(_FOLD)
