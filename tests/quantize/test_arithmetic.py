"""Ranges and levels, against the numbers of the issue and TensorFlow's ops."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.quantize.spec import (
    check_bits,
    levels,
    nudged,
    step,
    symmetric,
    with_zero,
)
from tests.quantize.tiny import fake_quant
from tests.settings import evaluate

BITS = [2, 3, 4, 8, 12, 16]


def test_the_numbers_of_the_issue():
    low, high = nudged(-0.1, 6.3, 8)
    assert (round(float(low), 5), round(float(high), 5)) == (-0.10039, 6.29961)
    assert nudged(-1.0, 1.0, 8, narrow_range=True) == (-1.0, 1.0)
    assert (levels(8), levels(8, narrow_range=True)) == (256, 255)


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("bits", BITS)
def test_nudged_and_the_reference_of_these_tests_are_what_fake_quant_ops_do(
    bits, narrow
):
    random = np.random.default_rng(bits)
    lows = np.float32(-random.uniform(0, 8, 20))
    highs = np.float32(random.uniform(0.1, 8, 20))
    drawn = np.float32(random.normal(size=(50, 20)) * 4)
    huge = np.float32([[-1e6] * 20, [1e6] * 20, [0] * 20])
    x = np.concatenate([huge, drawn])
    with tf.Graph().as_default() as graph:
        y = tf.quantization.fake_quant_with_min_max_vars_per_channel(
            x, lows, highs, num_bits=bits, narrow_range=narrow
        )
    (values,) = evaluate(graph, [y])
    low, high = nudged(lows, highs, bits, narrow)
    size = np.abs(values).max() * 1e-6
    np.testing.assert_allclose(values[0], low, rtol=0, atol=size)
    np.testing.assert_allclose(values[1], high, rtol=0, atol=size)
    # Zero is one of the values, up to the rounding of a float32.
    np.testing.assert_allclose(values[2], 0, atol=size)
    expected = fake_quant(drawn, lows, highs, bits, narrow)
    np.testing.assert_allclose(values[3:], expected, atol=2e-6)


@pytest.mark.parametrize("bits", BITS)
def test_symmetric_ranges(bits):
    low, high = symmetric(-0.5, 2.0, bits, narrow_range=True)
    assert (low, high) == (-2.0, 2.0)
    low, high = symmetric(-3.0, 2.0, bits, narrow_range=False)
    half = 2 ** (bits - 1)
    expected = max(3.0, 2.0 * half / (half - 1))
    assert low == pytest.approx(-expected)
    assert high == pytest.approx(expected * (half - 1) / half)
    # The zero point is in the middle.
    size = step(low, high, bits)
    assert np.round(-low / size) == half


def test_ranges_of_channels_of_one_sign_and_without_width():
    low, high = symmetric(np.array([-1.0, 0.0]), np.array([0.5, 3.0]), 8, True)
    assert low.tolist() == [-1.0, -3.0]
    assert high.tolist() == [1.0, 3.0]
    assert with_zero(1.0, 2.0) == (0.0, 2.0)
    assert with_zero(-2.0, -1.0) == (-2.0, 0.0)
    assert step(0.0, 0.0, 8) == 0.0
    assert nudged(0.0, 0.0, 8) == (0.0, 0.0)


@pytest.mark.parametrize("bits", [1, 17, 0, -8, 8.0, True, "8", None])
def test_bits_that_fake_quant_ops_do_not_take(bits):
    with pytest.raises(QuantizeError, match=r"my_bits.*(2 to 16|whole number)"):
        check_bits(bits, "my_bits")
    for taken in (2, 16, np.int64(8)):
        check_bits(taken)
