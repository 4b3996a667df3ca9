"""Checkpointed functions hold less under XLA, as TensorFlow's allocator counts.

XLA asks for all that it holds as one piece, and the allocator hands out one of up to
twice that size if other tests left it: the peak is only known where none ran.
"""

import pytest
import tensorflow as tf

from tests.gradients.apart import is_child
from tests.gradients.wrapped import test_memory
from tests.gradients.wrapped.comparing import needs_statistics, peak_bytes
from tests.gradients.wrapped.test_memory import BLOCKS, LAYERS, WRAPPED, X, weights
from tests.thorough import chosen

__all__ = ["weights"]
pytestmark = [
    needs_statistics,
    pytest.mark.skipif(not is_child("xla"), reason="needs a process of its own"),
]


@pytest.mark.parametrize("wrapped", chosen(WRAPPED, "blocks"))
def test_the_peak_falls(wrapped, weights):
    peaks, x = [], tf.constant(X)
    for function in (test_memory.plain(weights), WRAPPED[wrapped](weights)):
        step = test_memory.gradients_of(function, weights)
        step = tf.function(step, jit_compile=True)
        peaks.append(peak_bytes(lambda step=step: step(x)))
    most, saved = peaks
    # All activations, or those between blocks and within one with some to spare.
    assert most > BLOCKS * LAYERS * X.nbytes
    assert saved < (BLOCKS + LAYERS + 4) * X.nbytes
