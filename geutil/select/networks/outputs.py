"""Outputs of networks as arrays: how far two are apart, and where that is most.

Arithmetic alone, which every comparison of two models is made of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def widened(a: Array) -> Array:
    """Return numbers in the widest dtype of their kind: float64 or complex128."""
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def distances(x: Array, y: Array) -> Array:
    """Return |x - y| of widened arrays of one shape, element by element.

    NaN equals NaN, and an infinity the same infinity; either against anything else is
    infinitely far off.

    Example:
        >>> import numpy as np
        >>> distances(np.array([1.0, np.nan, np.inf]), np.array([3.0, np.nan, 0.0]))
        array([ 2.,  0., inf])
    """
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(same, 0.0, np.abs(x - y))
    return np.where(np.isnan(apart), np.inf, apart)


def exact_distances(a: Array, b: Array) -> Array:
    """Return |a - b| of integers, of which float64 does not hold all.

    Differences of int64 and uint64 do not fit into either, so Python's integers are
    subtracted.
    """
    return np.abs(a.astype(object) - b.astype(object)).astype(np.float64)


def farthest(apart: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest of some distances, and its first index.

    Args:
        apart: distances, at least one.
    """
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    index = tuple(int(i) for i in place)
    return float(apart[index]), index
