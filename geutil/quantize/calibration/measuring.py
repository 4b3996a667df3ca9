"""What is measured of tensors that share a range."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.kinds import Tensor


def measured(
    bins: int, tensors: Sequence[Tensor], lowest: float = -float("inf")
) -> dict[str, Tensor]:
    """Measure tensors that share a range, by their finite values.

    Args:
        bins: the number of bins of a histogram; 0 makes none.
        tensors: the tensors.
        lowest: what is no higher is left out as infinities are.

    Returns:
        `low` and `high`, with zero in between; whether all is `finite`; whether there
        is anything `below`, a negative infinity at least; and of a histogram the
        `counts`, with `zeros` counted apart.
    """
    flat = [tf.reshape(t, [-1]) for t in tensors]
    values = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    is_finite = tf.math.is_finite(values)
    is_below = values <= lowest
    counted = tf.where(is_finite & ~is_below, values, 0.0)
    low = tf.minimum(tf.reduce_min(counted), 0.0)
    high = tf.maximum(tf.reduce_max(counted), 0.0)
    found = {
        "low": low,
        "high": high,
        "finite": tf.reduce_all(is_finite),
        "below": tf.reduce_any(is_below),
    }
    if bins:
        others = tf.boolean_mask(counted, counted != 0.0)
        # A width of zero cannot be divided by.
        ends = tf.stack([low, tf.where(high > low, high, low + 1.0)])
        found["counts"] = tf.histogram_fixed_width(others, ends, bins)
        found["zeros"] = tf.math.count_nonzero(values == 0.0)
    return found
