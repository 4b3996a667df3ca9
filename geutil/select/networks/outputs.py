"""Outputs of networks as arrays: how far two are apart, and where that is most.

Arithmetic alone, which every comparison of two models is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RTOL, ATOL = 1e-5, 1e-6
"""Differences that rounding explains in float32: those of `Model.compare`."""

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
    """Return |a - b| of integers, of which float64 does not hold all."""
    # Differences of int64 and uint64 do not fit into either: Python's integers do.
    return np.abs(a.astype(object) - b.astype(object)).astype(np.float64)


def farthest(apart: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest of some distances, and its first index."""
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    index = tuple(int(i) for i in place)
    return float(apart[index]), index


@dataclass(frozen=True)
class Motion:
    """How much an output moves with the samples that it is compared on.

    Two networks that give the same number for every input agree, whatever they compute:
    a comparison proves something where the outputs move by more than it allows.

    Attributes:
        varies: the largest difference of an element from the first sample's.
        largest: the largest magnitude of an element, over all samples.
        samples: how many samples there were.

    Example:
        >>> print(Motion(3e-9, 0.25, 16))
        varies by 3e-09 over 16 samples: this comparison proves nothing
        >>> print(Motion(0.5, 2.0, 16))
        varies by 0.5 over 16 samples
    """

    varies: float
    largest: float
    samples: int

    def proves(self, rtol: float = RTOL, atol: float = ATOL) -> bool:
        """Tell whether the output moves by more than the tolerances allow."""
        # One sample has nothing to move from, so that nothing is known.
        return self.samples < 2 or self.varies > atol + rtol * self.largest

    def relative(self, apart: float) -> float:
        """Return a difference relative to the largest magnitude of the output."""
        if not apart:
            return 0.0
        return apart / self.largest if self.largest else float("inf")

    def told(self, rtol: float = RTOL, atol: float = ATOL) -> str:
        """Return the motion in words; "" of one sample."""
        if self.samples < 2:
            return ""
        over = f"over {self.samples} samples"
        moves = f"varies by {self.varies:.3g} {over}"
        if not self.varies:
            moves = f"does not change {over}"
        nothing = ": this comparison proves nothing"
        return moves if self.proves(rtol, atol) else moves + nothing

    def __str__(self) -> str:
        return self.told()


def rows_of(inputs: Mapping[str, Any]) -> int | None:
    """Return the one length that all inputs have; None if there is none."""
    lengths = {
        shape[0] if (shape := np.shape(value)) else None for value in inputs.values()
    }
    return lengths.pop() if len(lengths) == 1 else None


class Movement:
    """The motion of an output, sample by sample."""

    def __init__(self) -> None:
        self._first: Array | None = None
        self._varies = self._largest = 0.0
        self._samples = 0

    def add(self, values: Array, rows: int | None) -> None:
        """Take in an output for a batch of `rows` samples."""
        # An output that is not as long is one of the whole batch.
        by_row = rows is not None and values.ndim and len(values) == rows
        samples = values if by_row else values[None]
        self._samples += len(samples)
        if not samples.size:
            return
        if self._first is None:
            self._first = np.asarray(samples[0], samples.dtype)
        if self._first.shape != samples.shape[1:]:
            # A shape that hangs on the data moves with them.
            self._varies = float("inf")
        elif values.dtype.kind in "fciubV":
            wide = widened(samples)
            apart = distances(wide, widened(self._first)[None])
            self._varies = max(self._varies, float(apart.max()))
            finite = np.abs(wide[np.isfinite(wide)])
            self._largest = max(self._largest, float(finite.max(initial=0.0)))
        elif np.any(samples != self._first):
            self._varies = float("inf")

    def entry(self) -> Motion:
        """Return what was seen."""
        return Motion(self._varies, self._largest, self._samples)
