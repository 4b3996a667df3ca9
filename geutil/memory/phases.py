"""Which part of a training step an op is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PHASES = ("forward", "recompute", "backward", "update")
"""The parts, in the order in which they begin."""

_RECOMPUTED = "recomputed"
_GRADIENTS = ("gradients", "gradient_tape")
"""The scopes of what runs again, and of gradients: geutil's and TensorFlow's names."""


def phases_of(ops: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Return the phase of each op of a step.

    Gradients lie in a scope that TensorFlow or geutil gave them, and what runs again in
    geutil's own. Of the rest, what depends on either is the update, and what does not
    is the forward pass.

    Args:
        ops: in the order in which they run, the name of each, and the places of those
            that it reads or waits for.

    Returns:
        For each op, "forward", "recompute", "backward" or "update".

    Cost: linear in ops and edges.

    Example:
        >>> step = [("x", []), ("y", [0]), ("gradients/y_grad", [1]), ("w/add", [2])]
        >>> phases_of(step)
        ['forward', 'forward', 'backward', 'update']
    """
    phases: list[str] = []
    depends: list[bool] = []
    for name, reads in ops:
        phase = _scoped(name)
        behind = any(depends[place] for place in reads)
        phases.append(phase or ("update" if behind else "forward"))
        # A constant in the scope of gradients may serve the forward pass, too:
        # Grappler keeps one of several that are equal.
        depends.append(behind or (phase is not None and bool(reads)))
    return phases


def _scoped(name: str) -> str | None:
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
