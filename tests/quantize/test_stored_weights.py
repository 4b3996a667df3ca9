"""Weights in 4 bits: those that fit, and none that only seem to."""

import numpy as np
import pytest

from geutil import tflite
from geutil.quantize.tflite.stored_weights import pack_weights


@pytest.mark.parametrize(
    ("lowest", "dtype"), [(-7, "int4"), (-8, "int8"), (-127, "int8"), (-128, "int8")]
)
def test_weights_that_4_bits_hold_are_stored_in_them(lowest, dtype):
    m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
    x = m.add_input("x", "int8", [1, 4], quantization=steps)
    # In 8 bits -128 is its own absolute value.
    weights = np.array([[lowest, 0, 3, 7]], np.int8)
    w = m.add_constant("w", weights, quantization=steps)
    m.set_outputs([m.add("FULLY_CONNECTED", [x, w], name="y", quantization=steps)])
    pack_weights(m.graphs[0])
    assert w.dtype == dtype
    assert w.value.tolist() == weights.tolist()
    # The oldest kernel that reads weights of 4 bits.
    assert (m.op("y").version >= 10) == (dtype == "int4")
