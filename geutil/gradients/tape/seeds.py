"""The gradients that the targets themselves have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geutil.errors import TapeError
from geutil.gradients.tape.spaces import VSpace


def seeds(
    vspace: VSpace, target: Sequence[Any], output_gradients: Sequence[Any] | None
) -> list[Any]:
    """Return the gradient of each target: that which is given, or ones.

    Args:
        vspace: the space that they are in.
        target: the targets.
        output_gradients: their gradients; None, there or in the list, means ones.

    Raises:
        TapeError: there is no gradient for each target, or one of another shape.
    """
    given = [None] * len(target) if output_gradients is None else output_gradients
    if len(given) != len(target):
        raise TapeError(
            f"there are {len(target)} targets and {len(given)} output gradients; "
            "pass one for each target, or None in its place"
        )
    for place, (t, gradient) in enumerate(zip(target, given, strict=True)):
        if gradient is not None and not _fits(gradient, t):
            raise TapeError(
                f"output gradient {place} has shape {gradient.shape}, and its "
                f"target has shape {t.shape}; pass one of the target's shape"
            )
    return [
        vspace.ones_like(t) if gradient is None else gradient
        for t, gradient in zip(target, given, strict=True)
    ]


def _fits(gradient: Any, tensor: Any) -> bool:
    """Tell whether shapes agree, as far as they are known."""
    shape, other = gradient.shape, tensor.shape
    if hasattr(shape, "is_compatible_with"):
        return bool(shape.is_compatible_with(other))
    return tuple(shape) == tuple(other)
