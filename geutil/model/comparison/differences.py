"""How far apart two arrays are, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Difference:
    """Where two values of an output are farthest apart.

    NaN equals NaN, and an infinity the same infinity; either against anything else is
    infinitely far off. Integers, booleans and strings are compared exactly; booleans
    and strings have no distance, so that a difference is infinite.

    Attributes:
        output: the name of the output.
        equal: whether each element is: |a - b| <= atol + rtol * |b|.
        absolute: the largest |a - b|.
        relative: the largest |a - b| / |b|; infinite where b alone is 0.
        index: where the absolute difference is largest, None where there is none.
        sample: the number of the input that it came from.
        values: the two elements there.
        mismatch: how the dtypes or shapes differ, None if they do not; nothing else is
            compared then.
    """

    output: str
    equal: bool
    absolute: float
    relative: float
    index: tuple[int, ...] | None
    sample: int
    values: tuple[Any, Any] | None
    mismatch: str | None = None

    def __str__(self) -> str:
        if self.mismatch is not None:
            return f"{self.output}: {self.mismatch}"
        text = (
            f"{self.output}: largest difference {self.absolute:.3g} absolute, "
            f"{self.relative:.3g} relative"
        )
        if self.index is not None and self.values is not None:
            a, b = self.values
            text += f", at {list(self.index)} of sample {self.sample}: {a} and {b}"
        return text if self.equal else f"{text} (too much)"

    def worse(self, other: Difference | None) -> Difference:
        """Return the worse of two differences, with the largest of both numbers."""
        if other is None:
            return self
        first, second = (
            (other, self) if other.badness >= self.badness else (self, other)
        )
        return Difference(
            first.output,
            first.equal and second.equal,
            max(first.absolute, second.absolute),
            max(first.relative, second.relative),
            first.index,
            first.sample,
            first.values,
            first.mismatch,
        )

    @property
    def badness(self) -> tuple[bool, float, bool]:
        """Return what differences are ordered by."""
        return (self.mismatch is not None, self.absolute, not self.equal)


def difference(
    output: str, a: Array, b: Array, *, sample: int, rtol: float, atol: float
) -> Difference:
    """Return where two arrays are farthest apart; `b` is the reference.

    Example:
        >>> import numpy as np
        >>> d = difference(
        ...     "y",
        ...     np.array([1.0, 2.5]),
        ...     np.array([1.0, 2.0]),
        ...     sample=0,
        ...     rtol=0,
        ...     atol=0,
        ... )
        >>> print(d)
        y: largest difference 0.5 absolute, 0.25 relative, at [1] of sample 0: 2.5 and
        2.0 (too much)
    """
    mismatch = _mismatch(a, b)
    if mismatch is not None:
        inf = float("inf")
        return Difference(output, False, inf, inf, None, sample, None, mismatch)
    if not a.size:
        return Difference(output, True, 0.0, 0.0, None, sample, None)
    absolute, relative, close = _distances(a, b, rtol, atol)
    place = np.unravel_index(int(np.argmax(absolute)), a.shape)
    index = tuple(int(i) for i in place)
    largest = float(absolute[index])
    return Difference(
        output,
        bool(close.all()),
        largest,
        float(relative.max()),
        index if largest else None,
        sample,
        (a[index].item() if a.dtype != object else a[index], _plain(b[index]))
        if largest
        else None,
    )


def _plain(element: Any) -> Any:
    return element.item() if isinstance(element, np.generic) else element


def _mismatch(a: Array, b: Array) -> str | None:
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    return None


def _distances(
    a: Array, b: Array, rtol: float, atol: float
) -> tuple[Array, Array, Array]:
    """Return absolute and relative differences, and what is close enough."""
    same = np.asarray(a == b)
    if a.dtype == object or a.dtype == bool or a.dtype.kind not in "fciuV":
        far = np.where(same, 0.0, np.inf)
        return far, far, same
    if a.dtype.kind in "iu":
        # Python's integers: differences of int64 and uint64 do not fit into either.
        apart = np.abs(a.astype(object) - b.astype(object)).astype(np.float64)
        size = np.abs(b.astype(object)).astype(np.float64)
        return apart, _ratio(apart, size), same
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(same, 0.0, np.abs(x - y))
        apart = np.where(np.isnan(apart), np.inf, apart)
        allowed = atol + rtol * np.where(np.isfinite(y), np.abs(y), 0.0)
        return apart, _ratio(apart, np.abs(y)), same | (apart <= allowed)


def _ratio(apart: Array, size: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(apart == 0, 0.0, apart / size)
    return np.where(np.isnan(ratio), np.inf, ratio)
