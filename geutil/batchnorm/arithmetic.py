"""The arithmetic of folding: arrays or tensors in, arrays or tensors out.

Every function takes numpy arrays or TensorFlow tensors, all of one kind, and uses
nothing but their operators, `reshape` and a root. A batch norm computes, channel by
channel,

    y = gamma * (x - mean) / sqrt(variance + epsilon) + beta = scale * x + offset

(Ioffe and Szegedy 2015, arXiv 1502.03167). A layer that is linear in its weights takes
the scale into them, and the offset into its bias (Krishnamoorthi 2018, arXiv
1806.08342, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Value = Any
"""A numpy array, a TensorFlow tensor or a number."""


def rsqrt(value: Value) -> Value:
    """Return 1 / sqrt(value)."""
    if isinstance(value, np.ndarray | float):
        return 1.0 / np.sqrt(value)
    return tf.math.rsqrt(value)


def scale_and_offset(
    mean: Value,
    variance: Value,
    epsilon: float,
    gamma: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    """Return what a batch norm multiplies each channel by, and what it adds.

    scale = gamma / sqrt(variance + epsilon); offset = beta - mean * scale.

    Args:
        mean: the mean of each channel, shape [C].
        variance: its variance, biased, shape [C].
        epsilon: what is added to the variance.
        gamma: the scale after normalization, shape [C]; None is 1.
        beta: the offset after normalization, shape [C]; None is 0.

    Example:
        >>> import numpy as np
        >>> scale_and_offset(np.array([1.0]), np.array([3.0]), 1.0, np.array([4.0]))
        (array([2.]), array([-2.]))
    """
    scale = rsqrt(variance + epsilon)
    if gamma is not None:
        scale = scale * gamma
    offset = -(mean * scale)
    return scale, offset if beta is None else beta + offset


def along_axes(
    value: Value, rank: int, axes: Sequence[int], sizes: Sequence[int]
) -> Value:
    """Return a vector of channels in a shape that weights can be multiplied by.

    Args:
        value: shape [C], or a scalar, which is returned as it is.
        rank: the rank of the weights.
        axes: the axes of the weights that together count the channels, outer first.
        sizes: the sizes of these axes; their product is C.

    Example:
        >>> import numpy as np
        >>> along_axes(np.arange(6.0), 4, (2, 3), (2, 3)).shape
        (1, 1, 2, 3)
    """
    if not value.shape.rank if isinstance(value, tf.Tensor) else not np.ndim(value):
        return value
    shape = [1] * rank
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    if isinstance(value, np.ndarray):
        return value.reshape(shape)
    # A vector goes along the last axis as it is.
    return value if tuple(axes) == (rank - 1,) else tf.reshape(value, shape)


def shift_through(weights: Value, shift: Value, kept: Sequence[int]) -> Value:
    """Return what a layer makes of a shift of its data: the sum of weights * shift.

    Args:
        weights: the weights.
        shift: what is added to each channel of the data, in a shape that the weights
            can be multiplied by.
        kept: the axes of the weights that count the channels of the result; the sum is
            over all others.

    Returns:
        A vector: what is added to each channel of the result, at the positions where
        all of the window lies within the data.

    Example:
        >>> import numpy as np
        >>> weights = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> shift_through(weights, np.array([[1.0], [10.0]]), [1])
        array([31., 42.])
    """
    product = weights * shift
    if isinstance(product, np.ndarray):
        others = tuple(i for i in range(product.ndim) if i not in kept)
        return product.sum(others).reshape(-1)
    rank = product.shape.rank
    others = tuple(i for i in range(rank) if i not in kept)
    return tf.reshape(tf.reduce_sum(product, others), [-1])


class Affine:
    """What a run of steps does to each channel: x * scale + offset.

    Args:
        scale: a vector of channels or a scalar; None is 1.
        offset: likewise; None is 0.

    Example:
        >>> Affine().plus(3.0).times(2.0).plus(1.0)
        Affine(2.0, 7.0)
    """

    def __init__(self, scale: Value | None = None, offset: Value | None = None) -> None:
        self.scale = scale
        self.offset = offset

    def times(self, value: Value) -> Affine:
        """Return this, then times `value`."""
        scale = value if self.scale is None else self.scale * value
        return Affine(scale, None if self.offset is None else self.offset * value)

    def plus(self, value: Value) -> Affine:
        """Return this, then plus `value`."""
        offset = value if self.offset is None else self.offset + value
        return Affine(self.scale, offset)

    def __repr__(self) -> str:
        return f"Affine({self.scale}, {self.offset})"
