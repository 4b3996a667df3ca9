"""How often a step is run."""

from __future__ import annotations

SECONDS = 20.0
FEWEST, MOST = 2, 5


def rounds(seconds: float) -> int:
    """Return how many rounds of so many seconds are worth their time."""
    return max(FEWEST, min(MOST, int(SECONDS / seconds)))
