"""What the tests of checkpointed functions share."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.call_counts import without_collector


def assert_same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Compare nested gradients: None where None is, else close for the largest."""
    tf.nest.assert_same_structure(found, expected)
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert getattr(a, "dtype", float) == getattr(b, "dtype", float)
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert a.shape == b.shape
            assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0)


def dense(gradients: Any) -> Any:
    """Return sparse gradients as tensors, None as None."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def has_statistics() -> bool:
    """Tell whether the allocator counts, as that of oneDNN does."""
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False
    return True


needs_statistics = pytest.mark.skipif(not has_statistics(), reason="no statistics")


def peak_bytes(run: Any) -> int:
    """Return what the allocator holds at most in the last three of five runs."""
    for _ in range(2):
        run()
    peaks = []
    # What other tests left, or a thread has not let go of yet, may be freed in a run,
    # and is taken off its peak.
    with without_collector():
        for _ in range(3):
            tf.config.experimental.reset_memory_stats("CPU:0")
            before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            run()
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            peaks.append(peak - before)
    return max(peaks)
