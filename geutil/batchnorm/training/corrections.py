r"""What a fold for training corrects, and why (no graph surgery here).

A batch norm in training computes, with s(v) = sqrt(v + epsilon),

    y = gamma * (x - mean) / s(variance) + beta

with the statistics of the batch. Weights that took in gamma / s(variance) would jump
from batch to batch, and with them their ranges when they are quantized. So the weights
take in gamma / s(moving variance) instead, and the difference is put right behind the
layer (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2, figures 7 and 8). There:

    correction_scale  = s(variance) / s(moving variance)
    correction_offset = gamma * (mean / s(variance) - moving mean / s(moving variance))

The scale multiplies the weights that are folded with the batch's statistics,

    weights * gamma / s(variance) * correction_scale = weights * gamma / s(moving
    variance),

and its reciprocal what the layer makes of them. In this product s(variance) cancels.
It is left out from the start: it would add rounding, and gradients that cancel too.

Until the freeze the layer's result is divided by the scale and the bias is beta -
gamma * mean / s(variance): the batch norm as it was. From the freeze on nothing is
divided, and the correction offset is added to that bias, in which the batch's mean
cancels in turn: beta - gamma * moving mean / s(moving variance) is left, the batch norm
as it will be deployed.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from geutil.batchnorm.arithmetic import Affine, Value


class Corrected(NamedTuple):
    """What becomes of a layer.

    Attributes:
        weights: what its weights are multiplied by, shape [C].
        result: what its result is multiplied by, shape [C]: 1 / correction_scale until
            the freeze, 1 from then on.
        bias: what is added then, shape [C].
    """

    weights: Value
    result: Value
    bias: Value


def corrected(
    batch: Affine, moving: Affine, ratio: Value, frozen: Value | None
) -> Corrected:
    """Return what becomes of a layer whose batch norm is folded for training.

    Args:
        batch: what is done to each channel with the statistics of the batch.
        moving: the same with the moving ones; without a freeze its offset is not used.
        ratio: s(moving variance) / s(variance), the reciprocal of correction_scale,
            shape [C]. It is not made of the two scales: gamma may be zero.
        frozen: whether the freeze has come, a scalar; None if it never does.

    Example:
        >>> import tensorflow as tf
        >>> batch = Affine(tf.constant([6.0]), tf.constant([1.0]))
        >>> moving = Affine(tf.constant([3.0]), tf.constant([5.0]))
        >>> for frozen in (False, True):
        ...     made = corrected(batch, moving, tf.constant([2.0]), tf.constant(frozen))
        ...     print([float(value[0]) for value in made])
        [3.0, 2.0, 1.0]
        [3.0, 1.0, 5.0]
    """
    if frozen is None:
        return Corrected(moving.scale, ratio, batch.offset)
    return Corrected(
        moving.scale,
        tf.where(frozen, tf.ones_like(ratio), ratio),
        tf.where(frozen, moving.offset, batch.offset),
    )


def unbiased(variance: Value, count: Value) -> Value:
    """Return a variance with Bessel's correction: variance * count / (count - 1).

    Args:
        variance: the mean of squared differences from the mean.
        count: of how many values; of one alone, nothing is corrected.

    Example:
        >>> import tensorflow as tf
        >>> float(unbiased(tf.constant(3.0), tf.constant(4.0)))
        4.0
    """
    return variance * (count / tf.maximum(count - 1, 1))
