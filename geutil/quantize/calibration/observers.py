"""Observers.

The memory of each method of calibration, and the ranges that it makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.errors import QuantizeError
from geutil.quantize.spec import Range, nudged, step, with_zero

Array = np.ndarray[Any, Any]

_SHARES = np.linspace(0.02, 1.0, 99)
"""How much of the whole range is tried."""
_GRID = _SHARES[::5]
_AT_ONCE = 16
"""How many ranges are tried at once: of 1 to 625 for 1,575 bins, the fastest."""


class Histogram:
    """How often values occur, in bins of one width."""

    # Zeros are counted apart: any range stores them exactly.

    def __init__(self, bins: int) -> None:
        self.low, self.high = 0.0, 0.0
        self.counts: Array = np.zeros(bins)  # how many values there are in each bin
        self.zeros = 0.0

    def add(self, low: float, high: float, counts: Array, zeros: float) -> None:
        """Take in a histogram of other values, with as many bins."""
        # Where bins do not coincide a bin's values are counted at its middle: they move
        # by half a bin at most, each time the range grows.
        self.zeros += zeros
        if not counts.any():
            return
        if not self.counts.any():
            self.low, self.high, self.counts = low, high, counts.astype(float)
            return
        whole = min(low, self.low), max(high, self.high)
        self.counts = _spread(self.counts, self.low, self.high, whole)
        self.counts += _spread(counts, low, high, whole)
        self.low, self.high = whole

    @property
    def edges(self) -> Array:
        """Where bins begin and end."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)

    @property
    def centers(self) -> Array:
        """The middles of the bins."""
        edges = self.edges
        return (edges[:-1] + edges[1:]) / 2


def _spread(
    counts: Array, low: float, high: float, whole: tuple[float, float]
) -> Array:
    if (low, high) == whole:
        return counts.astype(float)
    edges = np.linspace(low, high, len(counts) + 1)
    centers = (edges[:-1] + edges[1:]) / 2
    spread, _ = np.histogram(centers, len(counts), whole, weights=counts)
    return spread


def percentile_range(histogram: Histogram, percentile: float) -> Range:
    """Return the range that all but a share of the values are in, on either side."""
    # `percentile`: the share in percent, such as 99.99: as much lies below the high
    # end, and above the low end.
    counts = np.append(histogram.counts, histogram.zeros)
    values = np.append(histogram.centers, 0.0)
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    # Shares such as 99.9 % are no floats; counts are whole.
    needed = counts.sum() * percentile / 100 - 1e-6
    high = values[np.searchsorted(np.cumsum(counts), needed)]
    low = values[::-1][np.searchsorted(np.cumsum(counts[::-1]), needed)]
    return Range(min(float(low), 0.0), max(float(high), 0.0))


def squared_error_range(histogram: Histogram, bits: int) -> Range:
    """Return the range with the least squared error, of rounding and of clipping."""
    # Banner et al. (2019, arXiv 1810.05723) do so for known distributions.
    # Hundreds of ranges are tried, and with a long tail most bins are empty.
    filled = histogram.counts > 0
    values, counts = histogram.centers[filled], histogram.counts[filled]

    def errors(ranges: Sequence[Range]) -> Array:
        parts = []
        for start in range(0, len(ranges), _AT_ONCE):
            tried = ranges[start : start + _AT_ONCE]
            low, high = np.transpose(tried)[..., np.newaxis]
            rounded = _rounded(values, low, high, bits)
            parts.append((counts * (values - rounded) ** 2).sum(-1))
        return np.concatenate(parts)

    return _best(histogram, errors)


def entropy_range(histogram: Histogram, bits: int) -> Range:
    """Return the range whose values tell most about the exact ones."""
    # The divergence of Kullback and Leibler between the distribution of values, with
    # those outside the range at its ends, and that of quantized values (Migacz 2017,
    # "8-bit inference with TensorRT").

    def divergence(low: float, high: float) -> float:
        """Return the divergence of the quantized distribution in a range."""
        values, counts = histogram.centers, histogram.counts
        inside = (values >= low) & (values <= high)
        if not inside.any():
            return float("inf")
        exact = np.where(inside, counts, 0.0)
        first, last = np.flatnonzero(inside)[[0, -1]]
        clipped = exact.copy()
        clipped[first] += counts[:first].sum()
        clipped[last] += counts[last + 1 :].sum()
        places = _places(values[inside], low, high, bits)
        filled = exact[inside] > 0
        # Clipped values count in the exact distribution only, so clipping has a cost.
        sums = np.bincount(places, exact[inside])
        sizes = np.bincount(places, filled)
        with np.errstate(invalid="ignore", divide="ignore"):
            quantized = np.where(filled, (sums / sizes)[places], 0.0)
        return _divergence(clipped[inside], quantized)

    return _best(histogram, lambda tried: np.array([divergence(*r) for r in tried]))


def _divergence(exact: Array, quantized: Array) -> float:
    p, q = exact / exact.sum(), quantized / max(quantized.sum(), 1e-300)
    support = p > 0
    return float(
        (p[support] * np.log(p[support] / np.maximum(q[support], 1e-12))).sum()
    )


def _best(histogram: Histogram, costs: Callable[[Sequence[Range]], Array]) -> Range:
    """Return the range of least cost."""
    # The ends are tried together, then on a grid, then each again with the other fixed.
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if low == high:
        return Range(low, high)

    def least(tried: Sequence[Range]) -> Range:
        return tried[int(np.argmin(costs(tried)))]

    tried = [Range(low * s, high * s) for s in _SHARES]
    if low and high:
        tried += [Range(low * s, high * t) for s in _GRID for t in _GRID]
    best = least(tried)
    if low:
        best = least([Range(low * s, best.high) for s in _SHARES])
    if high:
        best = least([Range(best.low, high * s) for s in _SHARES])
    return best


def _rounded(values: Array, low: float, high: float, bits: int) -> Array:
    ends = nudged(low, high, bits)
    width = step(low, high, bits)
    clipped = np.clip(values, ends.low, ends.high)
    return np.round((clipped - ends.low) / width) * width + ends.low


def _places(values: Array, low: float, high: float, bits: int) -> Array:
    """Return which levels values within a range are next to."""
    return np.round((values - low) / step(low, high, bits)).astype(int)


@dataclass(frozen=True)
class Settings:
    """The numbers of the methods."""

    decay: float = 0.9  # how much of a moving average a batch keeps
    # The share in percent of the values that are within the range.
    percentile: float = 99.99
    bins: int = 2048  # the number of bins of histograms

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 <= self.decay < 1:
            raise QuantizeError(f"decay={self.decay}; pass 0 <= decay < 1")
        if not 50 < self.percentile <= 100:
            raise QuantizeError(
                f"percentile={self.percentile}; pass more than 50, and 100 at most"
            )
        if self.bins < 256:
            raise QuantizeError(f"bins={self.bins}; pass 256 or more")


class Observer:
    """The memory of a method: the smallest and the largest value of all batches."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ends: tuple[float, float] | None = None

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        low, high = self._ends or (0.0, 0.0)
        self._ends = min(low, float(seen["low"])), max(high, float(seen["high"]))

    def ends(self, bits: int) -> Range:
        """Return the range."""
        del bits
        return Range(*(self._ends or (0.0, 0.0)))


class MovingAverage(Observer):
    """Moving averages of the ends of batches; the first batch is the start."""

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        batch = float(seen["low"]), float(seen["high"])
        low, high = self._ends or batch
        stays = self._settings.decay
        self._ends = (
            stays * low + (1 - stays) * batch[0],
            stays * high + (1 - stays) * batch[1],
        )


class Counted(Observer):
    """A histogram of all batches, and the range that a method chooses by it."""

    def __init__(
        self, settings: Settings, choose: Callable[[Histogram, int], Range]
    ) -> None:
        super().__init__(settings)
        self._histogram = Histogram(settings.bins)
        self._choose = choose

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in the measurements of a batch."""
        self._histogram.add(
            float(seen["low"]),
            float(seen["high"]),
            seen["counts"],
            float(seen["zeros"]),
        )

    def ends(self, bits: int) -> Range:
        """Return the range."""
        if not self._histogram.counts.any():
            return Range(0.0, 0.0)
        low, high = self._choose(self._histogram, bits)
        return with_zero(low, high)


METHODS: dict[str, Callable[[Settings], Observer]] = {
    "moving_average": MovingAverage,
    "min_max": Observer,
    "percentile": lambda s: Counted(
        s, lambda histogram, _: percentile_range(histogram, s.percentile)
    ),
    "entropy": lambda s: Counted(s, entropy_range),
    "mse": lambda s: Counted(s, squared_error_range),
}
COUNTING = frozenset(("percentile", "entropy", "mse"))
"""The methods that need histograms."""
