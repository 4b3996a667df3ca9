"""What each method of calibration remembers of the data, and makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from geutil.errors import QuantizeError
from geutil.quantize.arithmetic import Range, with_zero
from geutil.quantize.calibration.histograms import (
    Histogram,
    entropy_range,
    percentile_range,
    squared_error_range,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """The numbers of the methods.

    Attributes:
        decay: how much of a moving average a batch keeps.
        percentile: the share in percent of the values that are within the range.
        bins: the number of bins of histograms.
    """

    decay: float = 0.9
    percentile: float = 99.99
    bins: int = 2048

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 <= self.decay < 1:
            raise QuantizeError(f"decay={self.decay}; pass 0 <= decay < 1")
        if not 50 < self.percentile <= 100:
            raise QuantizeError(
                f"percentile={self.percentile}; pass more than 50, and 100 at most"
            )
        if self.bins < 256:
            raise QuantizeError(f"bins={self.bins}; pass 256 or more")


class Observer(Protocol):
    """Remembers what tensors held."""

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in what was measured on a batch."""

    def ends(self, bits: int) -> Range:
        """Return the range for what was seen."""


class MinMax:
    """The smallest and the largest value of all batches."""

    def __init__(self, settings: Settings) -> None:
        del settings
        self._low, self._high = 0.0, 0.0

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in what was measured on a batch."""
        self._low = min(self._low, float(seen["low"]))
        self._high = max(self._high, float(seen["high"]))

    def ends(self, bits: int) -> Range:
        """Return the range for what was seen."""
        del bits
        return Range(self._low, self._high)


class MovingAverage:
    """Moving averages of the ends of batches; the first batch is the start."""

    def __init__(self, settings: Settings) -> None:
        self._decay = settings.decay
        self._average: tuple[float, float] | None = None

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in what was measured on a batch."""
        batch = float(seen["low"]), float(seen["high"])
        before = self._average or batch
        self._average = (
            self._decay * before[0] + (1 - self._decay) * batch[0],
            self._decay * before[1] + (1 - self._decay) * batch[1],
        )

    def ends(self, bits: int) -> Range:
        """Return the range for what was seen."""
        del bits
        return Range(*(self._average or (0.0, 0.0)))


class Counted:
    """A histogram of all batches, and the range that a method chooses by it."""

    def __init__(
        self, settings: Settings, choose: Callable[[Histogram, int], Range]
    ) -> None:
        self._histogram = Histogram(settings.bins)
        self._choose = choose

    def add(self, seen: Mapping[str, Array]) -> None:
        """Take in what was measured on a batch."""
        self._histogram.add(
            float(seen["low"]),
            float(seen["high"]),
            seen["counts"],
            float(seen["zeros"]),
        )

    def ends(self, bits: int) -> Range:
        """Return the range for what was seen."""
        if not self._histogram.counts.any():
            return Range(0.0, 0.0)
        low, high = self._choose(self._histogram, bits)
        return with_zero(low, high)


METHODS: dict[str, Callable[[Settings], Observer]] = {
    "moving_average": MovingAverage,
    "min_max": MinMax,
    "percentile": lambda s: Counted(
        s, lambda histogram, _: percentile_range(histogram, s.percentile)
    ),
    "entropy": lambda s: Counted(s, entropy_range),
    "mse": lambda s: Counted(s, squared_error_range),
}
COUNTING = frozenset(("percentile", "entropy", "mse"))
"""The methods that need histograms."""
