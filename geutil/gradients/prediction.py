"""Stub."""

from geutil.gradients.segments import Recomputation


def predicted_peak(plan: Recomputation) -> int:
    """Stub."""
    return len(plan.kept)
