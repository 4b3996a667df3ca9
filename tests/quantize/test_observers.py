"""What methods remember, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from geutil.errors import QuantizeError
from geutil.quantize.calibration.observers import COUNTING, METHODS, Settings


def seen(values, bins=2048):
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    others = values[values != 0]
    counts, _ = np.histogram(others, bins, (low, high))
    return {
        "low": low,
        "high": high,
        "counts": counts,
        "zeros": np.asarray(len(values) - len(others)),
    }


BATCHES = [np.random.default_rng(i).normal(0.3, 1 + i, size=500) for i in range(5)]


def observed(method, settings, batches=BATCHES, bits=8):
    observer = METHODS[method](settings)
    for batch in batches:
        observer.add(seen(batch))
    return observer.ends(bits)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_the_moving_average_starts_with_the_first_batch(decay):
    ends = [(batch.min(), batch.max()) for batch in BATCHES]
    average = np.array(ends[0])
    for end in ends[1:]:
        average = decay * average + (1 - decay) * np.array(end)
    found = observed("moving_average", Settings(decay=decay))
    np.testing.assert_allclose(found, average, rtol=1e-12)


def test_the_smallest_and_largest_of_all_batches():
    values = np.concatenate(BATCHES)
    found = observed("min_max", Settings())
    assert found == (values.min(), values.max())


def test_ranges_hold_zero():
    batches = [np.full(4, 3.0), np.full(4, 5.0)]
    for method in METHODS:
        low, high = observed(method, Settings(), batches)
        assert low == 0.0
        assert 3.0 <= high <= 5.0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_zeros_is_a_range_without_width(method):
    assert observed(method, Settings(), [np.zeros(5)] * 2) == (0.0, 0.0)


def test_percentiles_of_all_batches():
    values = np.concatenate(BATCHES)
    low, high = observed("percentile", Settings(percentile=99.0))
    bin_width = np.ptp(values) / 2048
    wanted = np.percentile(values, [1.0, 99.0], method="nearest")
    # Bins were moved each time the range grew, by half a bin.
    np.testing.assert_allclose([low, high], wanted, rtol=0, atol=4 * bin_width)


def test_the_methods_that_count():
    assert set(METHODS) >= COUNTING


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decay", -0.1),
        ("decay", 1.0),
        ("percentile", 50.0),
        ("percentile", 100.1),
        ("bins", 255),
    ],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(QuantizeError, match=f"{name}={value}"):
        Settings(**{name: value})
