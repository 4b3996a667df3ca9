"""Outputs of networks as arrays: their largest differences, and the positions of these.

Only arithmetic, which every comparison of two models uses.
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


def distances(a: Array, b: Array) -> Array:
    """Return |a - b| of arrays of one shape, element by element, in float64.

    NaN equals NaN, and an infinity the same infinity; either against anything else is
    infinitely far off. Integers are subtracted exactly, of which float64 does not hold
    all. Booleans and strings have no distance: what differs is infinitely far off.

    Example:
        >>> import numpy as np
        >>> distances(np.array([1.0, np.nan, np.inf]), np.array([3.0, np.nan, 0.0]))
        array([ 2.,  0., inf])
    """
    same = np.asarray((a == b) | ((a != a) & (b != b)))
    kinds = {a.dtype.kind, b.dtype.kind}
    if not kinds <= {*"fciuV"}:
        return np.where(same, 0.0, np.inf)
    if kinds <= {*"iu"}:
        # Differences of int64 and uint64 fit into neither: Python's integers do it.
        return np.abs(a.astype(object) - b.astype(object)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(same, 0.0, np.abs(widened(a) - widened(b)))
    return np.where(np.isnan(apart), np.inf, apart)


def farthest(apart: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest of some distances, and its first index."""
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    index = tuple(int(i) for i in place)
    return float(apart[index]), index


@dataclass(frozen=True)
class Difference:
    """The largest difference between two values of an output.

    NaN equals NaN, and an infinity the same infinity; compared with anything else,
    their difference is infinite. Integers, booleans and strings are compared exactly;
    any difference of booleans or strings is infinite.

    Attributes:
        output: the name of the output.
        equal: whether each element is: |a - b| <= atol + rtol * |b|.
        absolute: the largest |a - b|.
        relative: the largest |a - b| / |b|; infinite where b alone is 0.
        index: the position of the largest absolute difference; None if there is none.
        sample: the number of the input that it came from.
        values: the two elements there.
        mismatch: how the dtypes or shapes differ; then nothing else is compared. None
            if they agree.
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
        """Return the key that orders differences."""
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
    # The maximum of an empty array would raise.
    if not a.size:
        return Difference(output, True, 0.0, 0.0, None, sample, None)
    absolute, relative, close = _distances(a, b, rtol, atol)
    largest, index = farthest(absolute)
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
    """Return absolute and relative differences, and which are close enough."""
    apart = distances(a, b)
    # Text and truth values are equal or not, without a distance.
    if not {a.dtype.kind, b.dtype.kind} <= {*"fciuV"}:
        return apart, apart, apart == 0
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(widened(b))
        allowed = atol + rtol * np.where(np.isfinite(size), size, 0.0)
        # Integers are exact: no rounding excuses a difference.
        if a.dtype.kind in "iu":
            allowed = np.zeros_like(size)
        return apart, _ratio(apart, size), (apart == 0) | (apart <= allowed)


def _ratio(apart: Array, size: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(apart == 0, 0.0, apart / size)
    return np.where(np.isnan(ratio), np.inf, ratio)


@dataclass(frozen=True)
class Motion:
    """How much an output moves with the samples that it is compared on.

    Two networks that give the same number for every input agree, whatever they compute:
    a comparison proves something where the outputs move by more than it allows.

    Attributes:
        varies: the largest difference of an element from the first sample's.
        largest: the largest magnitude of an element, over all samples.
        samples: how many samples there were.
        nan: how many elements were NaN, over all samples.
        infinite: how many elements were infinite.

    Example:
        >>> print(Motion(3e-9, 0.25, 16))
        varies by 3e-09 over 16 samples: this comparison proves nothing
        >>> print(Motion(0.5, 2.0, 16))
        varies by 0.5 over 16 samples
        >>> print(Motion(float("inf"), 2.0, 16, nan=3))
        varies by inf over 16 samples; holds 3 NaN
    """

    varies: float
    largest: float
    samples: int
    nan: int = 0
    infinite: int = 0

    def proves(self, rtol: float = RTOL, atol: float = ATOL) -> bool:
        """Return whether the output moves by more than the tolerances allow."""
        # One sample has nothing to move from, so that nothing is known.
        return self.samples < 2 or self.varies > atol + rtol * self.largest

    def relative(self, apart: float) -> float:
        """Return a difference relative to the largest magnitude of the output."""
        if not apart:
            return 0.0
        return apart / self.largest if self.largest else float("inf")

    def told(
        self, rtol: float = RTOL, atol: float = ATOL, *, equal: bool = True
    ) -> str:
        """Return the motion in words; "" of one sample of finite numbers."""
        # NaN equals NaN: without a word, two broken networks look like two good ones.
        holds = f"holds {self.not_finite}" if self.not_finite else ""
        return "; ".join(filter(None, [self._moves(rtol, atol, equal), holds]))

    @property
    def not_finite(self) -> str:
        """The elements that are no finite numbers, in words; "" if there are none."""
        counts = {"NaN": self.nan, "infinite": self.infinite}
        return " and ".join(
            f"{count} {kind}" for kind, count in counts.items() if count
        )

    def _moves(self, rtol: float, atol: float, equal: bool) -> str:
        if self.samples < 2:
            return ""
        over = f"over {self.samples} samples"
        moves = f"varies by {self.varies:.3g} {over}"
        if not self.varies:
            moves = f"does not change {over}"
        nothing = ": this comparison proves nothing"
        # A difference that was found is one, however little the outputs move.
        return moves if not equal or self.proves(rtol, atol) else moves + nothing

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
        self._samples = self._nan = self._infinite = 0

    def add(self, values: Array, rows: int | None) -> None:
        """Take in an output for a batch of `rows` samples."""
        # An output that is not as long is one of the whole batch.
        by_row = rows is not None and values.ndim and len(values) == rows
        samples = values if by_row else values[None]
        self._samples += len(samples)
        if not samples.size:
            return
        if values.dtype.kind in "fcV":
            wide = widened(values)
            self._nan += int(np.isnan(wide).sum())
            self._infinite += int(np.isinf(wide).sum())
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
        """Return the values seen."""
        return Motion(
            self._varies, self._largest, self._samples, self._nan, self._infinite
        )


class Tally:
    """The comparison of outputs by name, sample by sample.

    Args:
        rtol: the relative tolerance.
        atol: the absolute tolerance.

    Attributes:
        differences: by output, where the two are farthest apart.
    """

    def __init__(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        self._limits = {"rtol": rtol, "atol": atol}
        self.differences: dict[str, Difference] = {}
        self._movements: dict[str, Movement] = {}

    def add(self, name: str, a: Array, b: Array, sample: int, rows: int | None) -> None:
        """Take in an output of two networks for a batch, the second the reference."""
        new = difference(name, a, b, sample=sample, **self._limits)
        self.differences[name] = new.worse(self.differences.get(name))
        self._movements.setdefault(name, Movement()).add(b, rows)

    @property
    def motions(self) -> dict[str, Motion]:
        """How much each output of the reference moves with the samples."""
        return {name: moved.entry() for name, moved in self._movements.items()}
