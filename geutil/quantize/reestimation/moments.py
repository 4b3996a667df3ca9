"""Means and variances of data that comes in batches: numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Moments:
    """The mean and variance of all values of each channel.

    Batches are put together as if they were one (Chan, Golub and LeVeque 1979,
    "Updating formulae and a pairwise algorithm for computing sample variances").
    """

    def __init__(self) -> None:
        self._count = 0.0
        self.mean: Array = np.zeros(())
        self._squares: Array = np.zeros(())

    @property
    def variance(self) -> Array:
        """The mean of squared deviations, in float64."""
        return self._squares / self._count

    def add(self, count: float, mean: Array, variance: Array) -> None:
        """Take in a batch of so many values in each channel."""
        total = self._count + count
        apart = mean - self.mean
        self._squares = (
            self._squares + variance * count + apart**2 * (self._count * count / total)
        )
        self.mean = self.mean + apart * (count / total)
        self._count = total
