"""Timelines as the viewer takes them, with the phase of each op."""

from __future__ import annotations

from typing import Any

from geutil.memory import Timeline

PHASES = ("forward", "recompute", "backward", "update", "other")
"""Parts of a training step."""
_RECOMPUTED = "recomputed"
_GRADIENTS = ("gradients", "gradient_tape")
"""The scopes of what runs again, and of gradients: geutil's and TensorFlow's names."""


def timeline_data(label: str, timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the viewer takes it.

    Cost: linear in the ops.
    """
    names = [moment.op for moment in timeline.moments]
    return {
        "label": label,
        "source": timeline.source,
        "ops": names,
        "bytes": [moment.bytes for moment in timeline.moments],
        "phases": [PHASES.index(phase) for phase in phases_of(names)],
        "held": [
            {"name": t.name, "type": t.op_type, "bytes": t.bytes}
            for t in timeline.at_peak
        ],
        "variables": timeline.variable_bytes,
        "constants": timeline.constant_bytes,
    }


def phases_of(names: list[str]) -> list[str]:
    """Return the phase of each op of a step, told by the scopes of its gradients.

    Gradients lie in a scope that TensorFlow or geutil gave them, and what runs again in
    geutil's own. What runs before the last of both and in neither is forward, unless
    it is behind all of the forward pass; what runs after is the update.

    Args:
        names: the ops in the order in which they run.

    Example:
        >>> phases_of(["x", "y", "gradients/y_grad", "recomputed/y", "w/assign"])
        ['forward', 'forward', 'backward', 'recompute', 'update']
        >>> phases_of(["x", "y"])
        ['forward', 'forward']
    """
    scoped = [_scope_phase(name) for name in names]
    last = max((i for i, phase in enumerate(scoped) if phase), default=len(names))
    return [
        phase or ("forward" if place < last else "update")
        for place, phase in enumerate(scoped)
    ]


def _scope_phase(name: str) -> str | None:
    for part in name.split("/")[:-1]:
        if _is_scope(part, _RECOMPUTED):
            return "recompute"
        if any(_is_scope(part, scope) for scope in _GRADIENTS):
            return "backward"
    return None


def _is_scope(part: str, scope: str) -> bool:
    """Tell whether a part of a name is a scope, maybe with a number behind it."""
    rest = part.removeprefix(scope)
    return rest != part and (not rest or (rest[0] == "_" and rest[1:].isdigit()))
