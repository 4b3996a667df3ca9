"""Ranges and levels of quantized values: numpy in, numpy out.

A value x of a range [low, high] is stored as an integer q of b bits, with
x = scale * (q - zero point). Zero has to be one of the values, since padding and Relu
make exact zeros (Jacob et al. 2018, arXiv 1712.05877, section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from geutil.errors import QuantizeError

Array = np.ndarray[Any, Any]

FEWEST_BITS, MOST_BITS = 2, 16
"""What FakeQuant ops take."""


class Range(NamedTuple):
    """The smallest and the largest value that can be stored."""

    low: Any
    high: Any


def check_bits(bits: Any, what: str = "bits") -> None:
    """Raise QuantizeError unless FakeQuant ops take a number of bits."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer):
        raise QuantizeError(f"{what} is a whole number, not {bits!r}")
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise QuantizeError(
            f"{what}={bits} is out of range: FakeQuant ops take {FEWEST_BITS} to "
            f"{MOST_BITS} bits"
        )


def levels(bits: int, narrow_range: bool = False) -> int:
    """Return how many values there are: 2^bits, one less for a narrow range.

    Example:
        >>> from geutil.quantize.arithmetic import levels
        >>> levels(8), levels(8, narrow_range=True)
        (256, 255)
    """
    return int(2**bits) - int(narrow_range)


def with_zero(low: Any, high: Any) -> Range:
    """Return a range that is widened until it holds zero."""
    return Range(np.minimum(low, 0.0), np.maximum(high, 0.0))


def symmetric(low: Any, high: Any, bits: int, narrow_range: bool) -> Range:
    """Return the smallest range around a range whose zero point is in the middle.

    A narrow range has low = -high. A wide one has one value more below zero than above:
    high = -low * (2^(bits-1) - 1) / 2^(bits-1).

    Args:
        low: the smallest value, or an array of them, one for each channel.
        high: the largest.
        bits: the number of bits.
        narrow_range: leave the lowest integer out.

    Example:
        >>> from geutil.quantize.arithmetic import symmetric
        >>> [float(end) for end in symmetric(-0.5, 1.0, 8, narrow_range=True)]
        [-1.0, 1.0]
        >>> [float(end) for end in symmetric(-1.0, 0.5, 8, narrow_range=False)]
        [-1.0, 0.9921875]
    """
    ratio = symmetric_ratio(bits, narrow_range)
    low, high = with_zero(low, high)
    return Range(np.minimum(low, -high / ratio) + 0.0, np.maximum(high, -low * ratio))


def symmetric_ratio(bits: int, narrow_range: bool) -> float:
    """Return -high / low of a symmetric range."""
    return 1.0 if narrow_range else (2 ** (bits - 1) - 1) / 2 ** (bits - 1)


def nudged(low: Any, high: Any, bits: int, narrow_range: bool = False) -> Range:
    """Return a range moved by less than a step, so that zero is one of its values.

    FakeQuant ops do this themselves, in float32.

    Args:
        low: the smallest value, or an array of them, one for each channel.
        high: the largest.
        bits: the number of bits.
        narrow_range: leave the lowest integer out.

    Example:
        >>> import numpy as np
        >>> from geutil.quantize.arithmetic import nudged
        >>> low, high = nudged(-0.1, 6.3, bits=8)
        >>> print(f"{low:.5f} {high:.5f}")
        -0.10039 6.29961
    """
    low, high = (np.asarray(v, np.float32) for v in with_zero(low, high))
    least = np.float32(narrow_range)
    most = np.float32(2**bits - 1)
    scale = step(low, high, bits, narrow_range)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero_point = np.where(scale > 0, least - low / scale, least)
    zero_point = np.clip(np.floor(zero_point + np.float32(0.5)), least, most)
    return Range((least - zero_point) * scale, (most - zero_point) * scale)


def step(low: Any, high: Any, bits: int, narrow_range: bool = False) -> Array:
    """Return the distance of two neighbouring values, in float32."""
    low, high = (np.asarray(v, np.float32) for v in with_zero(low, high))
    return np.asarray((high - low) / np.float32(levels(bits, narrow_range) - 1))
