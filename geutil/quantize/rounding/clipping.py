"""Ranges of weights that are narrower than their values, channel by channel.

Weights outside are clipped; all others get smaller steps for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from geutil.quantize.rounding.targets import Target
from geutil.quantize.spec import Range

Array = np.ndarray[Any, Any]

_FACTORS = np.linspace(1.0, 0.4, 13)
_ROUNDS = 20


def min_max(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range as it is: that of the values."""
    del target, weights, hessian
    return ends


def mse(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range in which rounding changes the layer's result least."""
    # Of a range from 0.4 times as wide to all of it, the one with the least sum of
    # squared errors of the weights on their nearest levels, each counted by the mean
    # square of what it multiplies.
    # `weights`: [groups, inputs, outputs].
    # `hessian`: [groups, inputs, inputs].
    importance = np.einsum("gii->gi", hessian)[:, :, None]
    least, chosen = np.full(np.shape(ends.low), np.inf), np.ones(np.shape(ends.low))
    for factor in _FACTORS:
        grid = target.grid(_scaled(ends, factor))
        error = importance * (grid.nearest(weights) - weights) ** 2
        total = _by_channel(target.simulated(error), np.shape(ends.low))
        chosen = np.where(total < least, factor, chosen)
        least = np.minimum(total, least)
    return _scaled(ends, chosen)


def octav(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range with the least error if weights lay evenly within each step."""
    # With b bits, s is where the noise of steps, s^2 4^-b / 3 for each weight inside,
    # and that of clipping balance: s <- sum of |w| outside / (4^-b / 3 inside +
    # outside), by their numbers (Sakr et al. 2022, arXiv 2206.06501, equation 6).
    # `weights`: [groups, inputs, outputs].
    del hessian
    size = np.abs(target.simulated(weights)).astype(np.float64)
    shape = np.shape(ends.low)
    share = 4.0**-target.site.form.bits / 3.0
    bound = _by_channel(size, shape) / np.maximum(_by_channel(size > 0, shape), 1)
    for _ in range(_ROUNDS):
        outside = size > bound
        inside = _by_channel((size > 0) & ~outside, shape)
        weight = share * inside + _by_channel(outside, shape)
        total = _by_channel(np.where(outside, size, 0.0), shape)
        bound = np.where(weight > 0, total / np.maximum(weight, 1e-30), bound)
    low, high = (np.asarray(end, np.float64) for end in ends)
    return Range(
        np.maximum(low, -bound).astype(np.float32),
        np.minimum(high, bound).astype(np.float32),
    )


def _scaled(ends: Range, factor: Any) -> Range:
    low, high = (np.asarray(end * factor, np.float32) for end in ends)
    return Range(low, high)


def _by_channel(values: Array, shape: tuple[int, ...]) -> Array:
    """Return the sums of values over all axes but that of the channels, the last."""
    if not shape:
        return np.asarray(values.sum(dtype=np.float64))
    total: Array = values.reshape(-1, shape[0]).sum(0, dtype=np.float64)
    return total


CLIPPINGS: dict[str, Callable[[Target, Range, Array, Array], Range]] = {
    "min_max": min_max,
    "mse": mse,
    "octav": octav,
}
