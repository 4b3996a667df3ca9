"""Whether an array is, row by row, what the old model made of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from geutil.model.batching.rounding import same_bits, tolerance

Array = np.ndarray[Any, Any]
_MOST_WINDOWS = 6


class Kind(Enum):
    """What a comparison found."""

    MATCHES = "the rows match, and differ from each other"
    SILENT = "the rows match, and are all the same"
    CONSTANT = "it is the same for any batch"
    DIFFERS = "a row does not match"
    UNGROUPED = "there is no axis with a row for each input"


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        kind: the result.
        row: the first row that was compared where it fails.
        distance: how far the row is off.
        allowed: how far rounding may take it.
    """

    kind: Kind
    row: int = 0
    distance: float = 0.0
    allowed: float = 0.0


def windows(size: int, old: int) -> list[Array]:
    """Return the rows that the old model is run on: at most six windows of `old` rows.

    A window that is longer than the batch begins anew at its start; of such there are
    two, so that rows change their places.

    Example:
        >>> [w.tolist() for w in windows(5, 2)]
        [[0, 1], [2, 3], [3, 4]]
        >>> [w.tolist() for w in windows(1, 2)]
        [[0, 0]]
        >>> [w.tolist() for w in windows(2, 3)]
        [[0, 1, 0], [1, 0, 1]]
    """
    return list(_windows(size, old))


def _windows(size: int, old: int) -> Iterator[Array]:
    starts = list(range(0, size, old))
    if size > old:
        starts[-1] = size - old
    elif size > 1:
        starts.append(1)
    picked = np.linspace(0, len(starts) - 1, min(len(starts), _MOST_WINDOWS))
    for index in dict.fromkeys(int(i) for i in picked):
        yield (starts[index] + np.arange(old)) % size


def judge(
    references: Sequence[Array],
    found: Array,
    rows: Sequence[Array],
    size: int,
    rounding: float,
) -> Verdict:
    """Compare a result for a batch with results for windows of it.

    Args:
        references: what the old model makes of each window.
        found: what the new model makes of the batch.
        rows: the rows of each window.
        size: the size of the batch.
        rounding: the measured effect of rounding.
    """
    first, old = references[0], len(rows[0])
    allowed = tolerance(references, rounding)
    axis = batch_axis(first.shape, found.shape, old, size)
    if axis is None:
        constant = all(distance(r, found) <= allowed for r in references)
        return Verdict(Kind.CONSTANT if constant else Kind.UNGROUPED)
    factor = first.shape[axis] // old
    for window, wanted in zip(rows, references, strict=True):
        places = (window[:, None] * factor + np.arange(factor)).ravel()
        apart = distance(wanted, np.take(found, places, axis))
        if not apart <= allowed:
            return Verdict(Kind.DIFFERS, int(window[0]), apart, allowed)
    # A batch of one row has nothing to mix up.
    telling = size == 1 or any(distance(first, r) > allowed for r in references)
    return Verdict(Kind.MATCHES if telling else Kind.SILENT)


def batch_axis(
    before: Sequence[int], after: Sequence[int], old: int, new: int
) -> int | None:
    """Return the one axis that is as much longer as the batch is."""
    if len(before) != len(after):
        return None
    pairs = zip(before, after, strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(differing) != 1:
        return None
    axis = differing[0]
    grown = before[axis] % old == 0 and after[axis] == before[axis] // old * new
    return axis if grown else None


def distance(a: Array, b: Array) -> float:
    """Return the largest difference; infinite where shapes, NaNs or texts differ."""
    if a.shape != b.shape:
        return float("inf")
    if not a.size or same_bits(a, b):
        return 0.0
    if a.dtype == object or a.dtype == bool:
        return float("inf")
    x, y = _wide(a), _wide(b)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        apart = np.where(equal, 0.0, np.abs(x - y))
    return float("inf") if np.isnan(apart).any() else float(apart.max())


def _wide(a: Array) -> Array:
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)
