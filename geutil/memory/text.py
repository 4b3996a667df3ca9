"""Sizes in words."""

from __future__ import annotations


def megabytes(size: int) -> str:
    """Return a size in MB of 10^6 bytes, small ones with more places.

    Example:
        >>> megabytes(1_234_567_890), megabytes(4_194_304), megabytes(1200)
        ('1235 MB', '4.2 MB', '0.0012 MB')
    """
    amount = size / 1e6
    if size == 0 or abs(amount) >= 100:
        return f"{amount:.0f} MB"
    return f"{amount:.1f} MB" if abs(amount) >= 1 else f"{amount:.2g} MB"
