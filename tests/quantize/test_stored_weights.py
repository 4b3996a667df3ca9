"""Weights in 4 bits: those that fit, and none that only seem to."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.quantize import calibrate, fixed_quantize, quantize, to_tflite
from tests.quantize.converted import opened, spec
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.mark.parametrize(
    ("lowest", "bits", "dtype"),
    [(-7, 4, "int4"), (-8, 4, "int8"), (-127, 8, "int8"), (-128, 8, "int8")],
)
def test_weights_that_4_bits_hold_are_stored_in_them(lowest, bits, dtype):
    """In 8 bits -128 is its own absolute value."""
    highest = 2 ** (bits - 1) - 1
    levels = np.float32([[lowest, 3], [0, 7], [1, -1], [2, highest]])

    def dense(x):
        weights = tf.constant(levels * 0.5, name="w")
        narrow = lowest == -highest
        ends = 0.5 * lowest, 0.5 * highest
        rounded = fixed_quantize(weights, *ends, num_bits=bits, narrow_range=narrow)
        return {"y": tf.matmul(x, rounded, name="dense")}

    m = opened(dense, spec(None, 4, name="x"))
    quantize(m, is_training=False, scheme="int8x4")
    calibrate(m, [{"x": np.eye(4, dtype=np.float32)}], "min_max", rounding="nearest")
    ops = tflite.open(to_tflite(m, scheme="int8x4")).ops
    (op,) = (op for op in ops if op.kind == "FULLY_CONNECTED")
    stored = op.inputs[1]
    assert stored.dtype == dtype
    assert stored.value.tolist() == levels.T.tolist()
    # The oldest kernel that reads weights of 4 bits.
    assert (op.version >= 10) == (dtype == "int4")
