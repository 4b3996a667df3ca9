"""Histograms and what methods choose by them, against values counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from geutil.errors import QuantizeError
from geutil.quantize.calibration.observers import (
    COUNTING,
    METHODS,
    Histogram,
    Settings,
    entropy_range,
    percentile_range,
    squared_error_range,
)
from tests.quantize.tiny import fake_quant

BINS = 2048
DISTRIBUTIONS = {
    "normal": lambda g, n: g.normal(size=n),
    "relu": lambda g, n: np.maximum(g.normal(size=n), 0.0),
    "heavy tails": lambda g, n: g.standard_t(3, size=n),
    "one-sided": lambda g, n: -g.exponential(size=n),
    "uniform": lambda g, n: g.uniform(-1.0, 3.0, size=n),
}


@pytest.fixture(params=DISTRIBUTIONS)
def values(request):
    return DISTRIBUTIONS[request.param](np.random.default_rng(0), 39_999)


def histogram_of(values, bins=BINS):
    found = Histogram(bins)
    add(found, values)
    return found


def add(histogram, values):
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    others = values[values != 0]
    counts, _ = np.histogram(others, len(histogram.counts), (low, high))
    histogram.add(low, high, counts, len(values) - len(others))


def width(histogram):
    return (histogram.high - histogram.low) / len(histogram.counts)


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 99.99, 100.0])
def test_percentiles_are_those_of_numpy_within_a_bin(values, percentile):
    histogram = histogram_of(values)
    low, high = percentile_range(histogram, percentile)
    wanted = [
        -np.percentile(-values, percentile, method="inverted_cdf"),
        np.percentile(values, percentile, method="inverted_cdf"),
    ]
    assert abs(low - min(wanted[0], 0.0)) <= width(histogram)
    assert abs(high - max(wanted[1], 0.0)) <= width(histogram)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_squared_error_is_near_the_least(values, bits):
    low, high = squared_error_range(histogram_of(values), bits)

    def error(low, high):
        return float(((values - fake_quant(values, low, high, bits)) ** 2).sum())

    ends = min(values.min(), 0.0), max(values.max(), 0.0)
    shares = np.linspace(0.04, 1.0, 25)
    lows = ends[0] * shares if ends[0] else [0.0]
    highs = ends[1] * shares if ends[1] else [0.0]
    least = min(error(a, b) for a in lows for b in highs)
    assert error(low, high) <= 1.02 * least
    assert ends[0] <= low <= 0.0 <= high <= ends[1]


def test_outliers_are_cut_off():
    generator = np.random.default_rng(0)
    values = np.append(generator.normal(size=100_000), [50.0])
    _, high = squared_error_range(histogram_of(values), 4)
    assert high < 10.0
    _, high = percentile_range(histogram_of(values), 99.9)
    assert high < 5.0
    _, high = entropy_range(histogram_of(values), 8)
    assert high < 25.0


def naive_divergence(histogram, low, high, bits):
    """Spread each level's values evenly over its bins that hold any; bin by bin."""
    inside = [i for i, c in enumerate(histogram.centers) if low <= c <= high]
    if not inside:
        return np.inf
    counts = histogram.counts
    exact = [float(counts[i]) for i in inside]
    exact[0] += float(counts[: inside[0]].sum())
    exact[-1] += float(counts[inside[-1] + 1 :].sum())
    levels = {}
    for i in inside:
        level = round((histogram.centers[i] - low) / (high - low) * (2**bits - 1))
        levels.setdefault(level, []).append(i)
    told = {}
    for members in levels.values():
        filled = [i for i in members if counts[i] > 0]
        for i in filled:
            told[i] = sum(counts[j] for j in filled) / len(filled)
    p, q = np.array(exact), np.array([told.get(i, 0.0) for i in inside])
    p, q = p / p.sum(), q / q.sum()
    return sum(
        a * np.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a > 0
    )


@pytest.mark.parametrize("bits", [3, 8])
def test_the_divergence_is_the_least_of_shares(bits):
    values = np.random.default_rng(1).standard_t(4, size=5_000)
    histogram = histogram_of(values, 256)
    low, high = entropy_range(histogram, bits)
    found = naive_divergence(histogram, low, high, bits)
    shares = np.linspace(0.02, 1.0, 99)
    for share in shares:
        tried = histogram.low * share, histogram.high * share
        assert found <= naive_divergence(histogram, *tried, bits) + 1e-9


def test_histograms_grow_without_losing_values():
    generator = np.random.default_rng(0)
    histogram = Histogram(BINS)
    parts = [generator.normal(size=1000) * scale for scale in (0.1, 1.0, 3.0, 2.0)]
    for part in parts:
        add(histogram, part)
    values = np.concatenate(parts)
    assert histogram.counts.sum() == len(values)
    assert (histogram.low, histogram.high) == (values.min(), values.max())
    # A value moves by half a bin each time the range grows, which it does twice.
    reached = np.cumsum(histogram.counts)
    exact = np.searchsorted(np.sort(values), histogram.edges[1:], side="right")
    shift = 2
    assert np.all(reached[shift:] >= exact[:-shift])
    assert np.all(reached[:-shift] <= exact[shift:])


def test_zeros_do_not_count_as_values():
    histogram = Histogram(256)
    add(histogram, np.zeros(10))
    assert histogram.zeros == 10
    assert not histogram.counts.any()
    add(histogram, np.array([0.0, -1.0, 2.0]))
    assert (histogram.zeros, histogram.counts.sum()) == (11, 2)
    assert (histogram.low, histogram.high) == (-1.0, 2.0)


def test_ranges_hold_zero():
    def ends_of(method, *numbers):
        observer = METHODS[method](Settings())
        for number in numbers:
            counts, _ = np.histogram(
                [number] * 4 if number else [], BINS, (0.0, number)
            )
            zeros = np.asarray(0 if number else 4)
            observer.add({"low": 0.0, "high": number, "counts": counts, "zeros": zeros})
        return observer.ends(8)

    for method in METHODS:
        low, high = ends_of(method, 3.0, 5.0)
        assert low == 0.0
        assert 3.0 <= high <= 5.0
        # Nothing but zeros is a range without width.
        assert ends_of(method, 0.0, 0.0) == (0.0, 0.0)


def test_numbers_out_of_range_are_refused():
    assert set(METHODS) >= COUNTING
    for name, value in [
        ("decay", -0.1),
        ("decay", 1.0),
        ("percentile", 50.0),
        ("percentile", 100.1),
        ("bins", 255),
    ]:
        with pytest.raises(QuantizeError, match=f"{name}={value}"):
            Settings(**{name: value})
