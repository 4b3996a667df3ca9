"""The scales of cross-layer equalization: numpy only.

Channels of two layers with homogeneous ops between them can be scaled by any s > 0:
what the first layer makes by 1/s, and what the second one reads by s. With

    s = sqrt(r1 * r2) / r2

for the ranges r1 and r2 of a channel's weights in the two layers, both ranges become
sqrt(r1 * r2) (Nagel et al. 2019, arXiv 1906.04721, section 4.1, equation 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_MOST_SWEEPS = 1000
_CLOSE = 1e-7


@dataclass(eq=False)
class Weights:
    """The weights of a layer, being scaled.

    Attributes:
        values: the values, in float64.
        outputs: the axes that together count the channels of the result.
        inputs: those that count the channels of the data.
    """

    values: Array
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    def ranges(self, axes: tuple[int, ...]) -> Array:
        """Return the largest magnitude in each channel."""
        others = tuple(a for a in range(self.values.ndim) if a not in axes)
        found: Array = np.abs(self.values).max(others).reshape(-1)
        return found

    def scale(self, factors: Array, axes: tuple[int, ...]) -> None:
        """Multiply each channel by a factor."""
        self.values = self.values * spread(factors, self.values.shape, axes)


def spread(factors: Array, shape: Sequence[int], axes: tuple[int, ...]) -> Array:
    """Return factors of channels in a shape that broadcasts over weights."""
    sizes = [shape[axis] if axis in axes else 1 for axis in range(len(shape))]
    return factors.reshape(sizes)


def equalized(pairs: Sequence[tuple[Weights, Sequence[Weights]]]) -> list[Array]:
    """Scale the weights of pairs of layers until the ranges of each pair are alike.

    Args:
        pairs: a layer, and those that read what it makes. Of several the largest range
            of a channel counts.

    Returns:
        For each pair the s of its channels. Channels that are zero in a layer keep 1.

    Cost: a sweep over all weights for each iteration. A chain of 20 layers takes some
    100.
    """
    totals = [np.ones(first.ranges(first.outputs).size) for first, _ in pairs]
    for _ in range(_MOST_SWEEPS):
        change = 0.0
        for total, (first, seconds) in zip(totals, pairs, strict=True):
            scales = _scales(
                first.ranges(first.outputs),
                np.max([second.ranges(second.inputs) for second in seconds], 0),
            )
            first.scale(1 / scales, first.outputs)
            for second in seconds:
                second.scale(scales, second.inputs)
            total *= scales
            change = max(change, float(np.abs(np.log(scales)).max()))
        if change < _CLOSE:
            break
    return totals


def _scales(first: Array, second: Array) -> Array:
    used = (first > 0) & (second > 0)
    scales = np.ones(first.shape)
    scales[used] = np.sqrt(first[used] / second[used])
    return scales
