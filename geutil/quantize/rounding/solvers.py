"""Rounding of the weights of a layer: to the nearest levels, by GPTQ, by AdaRound.

Weights W [inputs, outputs] multiply rows x of data. Rounded ones Q are wanted that make
the squared error of the results least,

    E |x (Q - W)|^2 = sum over columns of (q - w)^T H (q - w),   H = E x^T x,

each q on the levels of its channel. A part of its mean diagonal makes H invertible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]

_BLOCK = 128  # inputs whose errors are fed back together: that of the paper of GPTQ
_NOTHING = 1e-10


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that weights can have: `low + step * k` for k from 0 to `most`."""

    low: Array  # the lowest value of each weight, in the shape of the weights
    step: Array  # the distance of two values; 0 where all weights of a channel are 0
    most: int  # the largest k

    def level(self, values: Array, where: Any = ...) -> Array:
        """Return the k of the values nearest to given ones, as floats."""
        step = self.step[where]
        safe = np.where(step > 0, step, np.float32(1.0))
        levels = np.floor((values - self.low[where]) / safe + np.float32(0.5))
        return np.clip(levels, 0, self.most)

    def value(self, levels: Array, where: Any = ...) -> Array:
        """Return the values of levels."""
        return self.low[where] + self.step[where] * levels

    def nearest(self, values: Array, where: Any = ...) -> Array:
        """Return the values nearest to given ones."""
        return self.value(self.level(values, where), where)


def damped(hessian: Array, share: float) -> Array:
    """Return Hessians with a share of their mean diagonal added to each of it."""
    # `hessian`: [groups, inputs, inputs].
    diagonal = np.einsum("gii->gi", hessian)
    mean = diagonal.mean(-1, keepdims=True)
    # Values next to nothing beside others are all rounding errors.
    added = share * np.maximum(mean, _NOTHING * mean.max())
    # Data of zeros alone: any rounding is as good as another.
    added = np.where(added > 0, added, 1.0)
    result = hessian.copy()
    np.einsum("gii->gi", result)[...] += added
    return result


def gptq(hessian: Array, weights: Array, grid: Grid) -> Array:
    """Return weights rounded one after the other, each for the errors before it."""
    # The error of weights that are rounded already is made up for by those that are
    # not: with H = R R^T and R upper triangular the error is
    # sum over k of (R_kk d_k + sum over j < k of R_jk d_j)^2,
    # whose terms are made least in order of k, from the input with the largest variance
    # on (Frantar et al. 2022, arXiv 2210.17323; that this is Babai's nearest plane:
    # Chen et al. 2025, arXiv 2507.18553).
    # `hessian`: [groups, inputs, inputs], positive definite.
    # `weights`: [groups, inputs, outputs].
    order = np.argsort(-np.einsum("gii->gi", hessian), axis=1, kind="stable")
    rows = order[:, :, None]
    permuted = np.take_along_axis(
        np.take_along_axis(hessian, rows, 1), order[:, None, :], 2
    )
    factor = np.linalg.cholesky(permuted[:, ::-1, ::-1])[:, ::-1, ::-1]
    feedback = factor / np.einsum("gii->gi", factor)[:, None, :]
    feedback = feedback.astype(np.float32)
    target = np.take_along_axis(weights, rows, 1).astype(np.float32)
    sorted_grid = _taken(grid, rows)
    error = np.zeros_like(target)
    count = target.shape[1]
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        before = feedback[:, :start, start:end].swapaxes(1, 2) @ error[:, :start]
        for k in range(start, end):
            within = np.einsum("gj,gjo->go", feedback[:, start:k, k], error[:, start:k])
            wanted = target[:, k] - before[:, k - start] - within
            rounded = sorted_grid.nearest(wanted, np.s_[:, k])
            error[:, k] = rounded - target[:, k]
    result = np.empty_like(target)
    np.put_along_axis(result, rows, target + error, 1)
    return result


def _taken(grid: Grid, rows: Array) -> Grid:
    shape = (*rows.shape[:2], grid.low.shape[2])
    low, step = (
        np.take_along_axis(np.broadcast_to(a, shape), rows, 1)
        for a in (grid.low, grid.step)
    )
    return Grid(low, step, grid.most)


# Those of Nagel et al. 2020, arXiv 2004.10568: section 3.3 and its implementation.
_STRETCH = (-0.1, 1.1)
# Nagel et al. 2020, arXiv 2004.10568: beta falls from 20 to 2 behind a first fifth.
_STEEP = (20.0, 2.0)
_FREE = 0.2
"""Measured as `rounding._STEPS` was: 24.4, 24.9 and 24.8 dB with 0.1, 0.2 and 0.4."""
_RATE = 0.1
"""Measured likewise: 24.5, 24.9 and 24.9 dB with 0.03, 0.1 and 0.3."""
_WEIGHT = 1.0
"""Measured likewise: 24.8, 24.9 and 24.4 dB with 0.3, 1 and 3."""


def adaround(hessian: Array, weights: Array, grid: Grid, steps: int) -> Array:
    """Return weights rounded up or down as gradient descent finds it best."""
    # A weight is its lower level and h(v) of a step, h a sigmoid that is stretched
    # beyond 0 and 1 and cut off there, and v is learnt with Adam. After a fifth of the
    # steps 1 - |2 h - 1|^b draws h to 0 or 1, the more so the lower b is: it falls from
    # 20 to 2 (Nagel et al. 2020, arXiv 2004.10568, equations 22 to 24).
    # `hessian`: [groups, inputs, inputs].
    # `weights`: [groups, inputs, outputs].
    step = np.where(grid.step > 0, grid.step, np.float32(1.0))
    position = np.clip((weights - grid.low) / step, 0, grid.most)
    lower = np.minimum(np.floor(position), grid.most - 1)
    share = np.clip(position - lower, 0.01, 0.99)
    least, greatest = _STRETCH
    inner = (share - least) / (greatest - least)
    start = np.log(inner / (1 - inner)).astype(np.float32)
    v = _learnt(
        tf.constant(hessian.astype(np.float32)),
        tf.constant(weights.astype(np.float32)),
        tf.constant((grid.low + step * lower).astype(np.float32)),
        tf.constant(np.broadcast_to(grid.step, weights.shape).astype(np.float32)),
        tf.constant(start),
        tf.constant(steps),
    )
    return grid.value(lower + (v.numpy() >= 0.0))


@tf.function(reduce_retracing=True)
def _learnt(
    hessian: Any, weights: Any, floor: Any, step: Any, start: Any, steps: Any
) -> Any:
    """Return the v of each weight after so many steps of Adam."""
    least, greatest = _STRETCH
    first, last = _STEEP
    count = tf.cast(steps, tf.float32)
    rest = weights - floor
    # So that both parts of the loss are per weight, in squared steps.
    scale = tf.reduce_mean(tf.linalg.diag_part(hessian)) * tf.reduce_mean(step**2)
    scale = tf.maximum(scale, 1e-30)
    v, mean, square = start, tf.zeros_like(start), tf.zeros_like(start)
    index = tf.constant(0)
    while index < steps:
        t = tf.cast(index, tf.float32)
        sigmoid = tf.sigmoid(v)
        stretched = sigmoid * (greatest - least) + least
        h = tf.clip_by_value(stretched, 0.0, 1.0)
        inside = tf.cast((stretched > 0.0) & (stretched < 1.0), tf.float32)
        slope = inside * sigmoid * (1.0 - sigmoid) * (greatest - least)
        by_error = 2.0 * tf.matmul(hessian, step * h - rest) * step / scale
        progress = (t / count - _FREE) / (1.0 - _FREE)
        steep = last + 0.5 * (first - last) * (1.0 + tf.cos(np.pi * progress))
        apart = 2.0 * h - 1.0
        by_rule = -2.0 * steep * tf.sign(apart) * tf.abs(apart) ** (steep - 1.0)
        weight = tf.where(progress > 0.0, _WEIGHT, 0.0)
        gradient = (by_error + weight * by_rule) * slope
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        unbiased = mean / (1.0 - 0.9 ** (t + 1.0))
        spread = tf.sqrt(square / (1.0 - 0.999 ** (t + 1.0))) + 1e-8
        v -= _RATE * unbiased / spread
        index += 1
    return v
