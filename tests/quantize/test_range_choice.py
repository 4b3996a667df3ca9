"""Ranges chosen one by one: by their noise at the outputs, or by another range."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from geutil.quantize.calibration import trials
from geutil.quantize.calibration.ranges import Follower, find_followers, find_sites
from geutil.quantize.calibration.trials import (
    METHODS,
    Histogram,
    Settings,
    entropy_range,
    percentile_range,
    squared_error_range,
)
from geutil.quantize.spec import Range, activation_format
from tests.quantize.converted import is_simulated, opened, spec
from tests.quantize.kernelwise import kernels_apart
from tests.quantize.tiny import fake_quant
from tests.settings import needs_eager

pytestmark = needs_eager

random = np.random.default_rng(0)
NARROW = spec(None, 6)
IMAGE = spec(None, 8, 8, 3)


def weights(*shape):
    return random.normal(0.0, 0.4, shape).astype(np.float32)


MATRIX, SECOND = weights(6, 8), weights(8, 5)
KERNELS = [weights(3, 3, 3, 6), weights(3, 3, 3, 6), *(weights(3, 3, 6, 4),) * 3]


def quantized(function, *specs):
    m = opened(function, *specs)
    quantize(m, is_training=False)
    return m


def rows(count=4, size=512):
    """Return batches of long tails: a few values are far out."""
    values = np.random.default_rng(1).standard_t(3, [count, size, 6])
    return [{"a": batch.astype(np.float32)} for batch in values]


def two_layers(a):
    return {"y": tf.matmul(tf.nn.relu(tf.matmul(a, MATRIX)), SECOND)}


def of_tails(a):
    """Return a result that only values far out reach."""
    return {"y": tf.matmul(tf.nn.relu(tf.matmul(a, MATRIX) - 8.0), SECOND)}


def exact(function, data):
    return np.concatenate(
        [function(tf.constant(batch["a"]))["y"].numpy() for batch in data]
    )


def noise(m, function, data):
    """Return the noise of a quantized model, as a share of the variance."""
    found = np.concatenate([m.run(**batch)["y"] for batch in data])
    wanted = exact(function, data)
    return float(np.mean((found - wanted) ** 2) / wanted.var())


@pytest.mark.parametrize("function", [two_layers, of_tails])
def test_the_noise_told_is_that_of_the_model(function):
    m, data = quantized(function, NARROW), rows()
    report = calibrate(m, data)
    measured = noise(m, function, data)
    assert report.noise[report.method] == pytest.approx(measured, rel=1e-3)
    calibrate(m, data, "min_max")
    assert report.noise["min_max"] == pytest.approx(noise(m, function, data), rel=1e-3)
    # Ranges of before have no part in the choice; those of weights start at -6 and 6.
    again = calibrate(m, data)
    assert report.noise == again.noise
    assert str(report) == str(again)


def test_where_only_large_values_count_nothing_is_clipped():
    m, data = quantized(of_tails, NARROW), rows()
    report = calibrate(m, data)
    assert report.method == "min_max"
    assert not report.whole
    chosen = noise(m, of_tails, data)
    calibrate(m, data, "mse")
    assert chosen < 0.2 * noise(m, of_tails, data)


def test_shares_are_near_those_that_each_range_adds(monkeypatch):
    """Each range alone, all else in float: one run for each range and method."""
    told = {}

    def noted(self, tried):
        told.update(tried=tried, shares=shares(self, tried))
        return told["shares"]

    shares = trials.RangeTrials._shares
    monkeypatch.setattr(trials.RangeTrials, "_shares", noted)
    m, data = quantized(two_layers, NARROW), rows()
    calibrate(m, data)
    wanted = exact(two_layers, data)
    points = {
        "a/input_quant": lambda a, q: tf.nn.relu(q(a) @ MATRIX) @ SECOND,
        "MatMul/act_quant": lambda a, q: q(tf.nn.relu(a @ MATRIX)) @ SECOND,
        "MatMul_1/act_quant": lambda a, q: q(tf.nn.relu(a @ MATRIX) @ SECOND),
    }
    assert set(points) == set(told["shares"])
    inputs = np.concatenate([batch["a"] for batch in data])
    for name, compute in points.items():
        for method, ranges in told["tried"].items():
            low, high = ranges[name]

            def rounded(x, low=low, high=high):
                return tf.quantization.fake_quant_with_min_max_vars(x, low, high)

            errors = compute(inputs, rounded).numpy() - wanted
            alone = float(np.sum(errors**2) / wanted.var() / wanted.size)
            share = told["shares"][name][method]
            assert share == pytest.approx(alone, rel=0.25), (name, method)


def test_ranges_of_few_values_are_not_clipped():
    """Of 400 values one tells nothing of those to come; the input has ten times as
    many, and half of its noise is that of the largest."""
    pooled = lambda a: {"y": tf.reduce_mean(tf.reshape(a, [-1, 10, 6]), 1)}  # noqa: E731
    m, data = quantized(pooled, NARROW), rows(size=170)
    report = calibrate(m, data)
    values = np.concatenate([pooled(b["a"])["y"] for b in data])
    (name,) = (n for n in report.ranges if "Mean" in n)
    assert report.by_range[name] == "min_max"
    np.testing.assert_allclose(report.ranges[name], [values.min(), values.max()], 1e-6)
    assert report.method == trials.PER_RANGE
    assert report.by_range["a/input_quant"] == "mse"
    assert "(min_max)" in str(report)
    # Each range is by the method that is told.
    ranges = {method: calibrate(m, data, method).ranges for method in trials.CANDIDATES}
    for name, method in report.by_range.items():
        assert report.ranges[name] == ranges[method][name]


def test_ranges_of_16_bits_have_room_for_other_data():
    m, data = opened(two_layers, NARROW), rows(size=64)
    quantize(m, is_training=False, scheme="int16x8")
    reach = max(np.abs(batch["a"]).max() for batch in data)
    for method, factor in (("best", 2.0), ("min_max", 1.0)):
        found = calibrate(m, data, method, rounding="nearest").ranges["a/input_quant"]
        np.testing.assert_allclose(found, [-factor * reach, factor * reach], 1e-6)


def test_one_batch_is_not_clipped():
    report = calibrate(quantized(two_layers, NARROW), rows(1))
    assert report.method == "min_max"
    assert "one method for all ranges: one batch" in str(report)


def without_gradient(a):
    colours = tf.reshape(tf.nn.relu(tf.matmul(a, MATRIX))[:, :6], [-1, 2, 3])
    adjusted = tf.raw_ops.AdjustHue(images=colours, delta=0.1)
    return {"y": tf.matmul(tf.reshape(adjusted, [-1, 6]), MATRIX)}


def test_a_model_without_gradients_gets_one_method():
    report = calibrate(quantized(without_gradient, NARROW), rows())
    assert report.method in trials.CANDIDATES
    assert set(report.noise) == set(trials.CANDIDATES)
    assert "no gradients" in report.whole
    assert "AdjustHue" in report.whole


def test_integers_have_no_gradients_and_are_left_out():
    def function(a):
        y = tf.matmul(a, MATRIX)
        return {"y": y, "place": tf.argmax(y, -1)}

    report = calibrate(quantized(function, NARROW), rows())
    assert report.method == "mse"
    assert not report.whole


def relus(a):
    """Return what several kernels make of one convolution."""
    first, other, *more = KERNELS
    y = tf.nn.conv2d(a, first, 1, "SAME", name="shared")
    z = tf.nn.conv2d(a, other, 1, "SAME", name="other")
    parts = [tf.nn.relu(y), tf.nn.relu6(y), y + z]
    ends = [
        tf.nn.conv2d(x, kernel, 1, "SAME")
        for x, kernel in zip(parts, more, strict=True)
    ]
    return dict(zip("pqr", ends, strict=True))


def calibrated_relus(*methods):
    """Check that the Relus have the steps of what they read; return model and data."""
    m = quantized(relus, IMAGE)
    values = np.random.default_rng(2).normal(0.0, 3.0, [3, 4, 8, 8, 3])
    data = [{"a": batch.astype(np.float32)} for batch in values]
    for method in methods:
        ranges = calibrate(m, data, method).ranges
        low, high = map(float, ranges["shared/conv_quant"])
        for name in ("Relu/act_quant", "Relu6/act_quant"):
            assert ranges[name] == pytest.approx((0.0, high - low), rel=1e-5), method
    return m, data


def test_relus_have_the_steps_of_what_they_read_by_every_method():
    calibrated_relus(*METHODS)


def test_relus_of_one_layer_are_what_is_simulated():
    m, data = calibrated_relus("best")
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data, layers=True)
    assert comparison.most <= 1
    assert not comparison.float_ops
    steps = {layer.op: layer.file_steps for layer in comparison.layers}
    assert {"Relu", "Relu6", "shared", "add"} <= set(steps)
    assert all(value is not None and value <= 1 for value in steps.values()), steps
    kernels = kernels_apart(m, blob, data[0])
    assert len(kernels) >= 5
    assert all(kernel.most <= 1 for kernel in kernels), kernels


def test_followers_are_products_and_relus_of_one_range():
    def function(a):
        y = tf.matmul(a, MATRIX, name="y")
        return {
            "half": tf.matmul(0.5 * y, SECOND),
            "turned": tf.matmul(y / -4.0, SECOND),
            "squared": tf.matmul(y * y, SECOND),
            "cut": tf.matmul(tf.nn.relu(tf.reshape(y, [-1, 8])), SECOND),
            "of input": tf.nn.tanh(a * MATRIX[:, 0]),
        }

    m = quantized(function, NARROW)
    sites = find_sites(m.graph, m.variables)
    followers = find_followers([site for site in sites if not site.is_weights])
    (source,) = {follower.source for follower in followers.values()}
    assert source == "y/act_quant"
    factors = [follower.factor for follower in followers.values()]
    assert sorted(factors, key=lambda f: f or 0.0) == [-0.25, None, 0.5]


ENDS = st.floats(0.01, 100.0)


@given(ENDS, ENDS, st.sampled_from([None, 0.125, -1.0, 3.0, 0.20412415]))
def test_followers_round_nothing_a_second_time(low, high, factor):
    source = Range(-low, high)
    ends = Follower("source", factor, activation_format(8)).ends(source)
    values = np.linspace(-1.5 * low, 1.5 * high, 999, dtype=np.float32)
    rounded = tf.quantization.fake_quant_with_min_max_vars(values, -low, high)
    made = tf.nn.relu(rounded) if factor is None else rounded * factor
    again = tf.quantization.fake_quant_with_min_max_vars(
        made, np.float32(ends.low), np.float32(ends.high)
    )
    step = (float(ends.high) - float(ends.low)) / 255
    assert np.abs(again - made).max() < 1e-3 * step


def test_a_model_for_training_keeps_ranges_of_its_own():
    m = opened(relus, IMAGE)
    quantize(m)
    names = [op.name for op in m.graph.get_operations() if is_simulated(op)]
    assert any(name.startswith("Relu6/act_quant") for name in names)


# -- histograms and what methods choose by them, against values one by one -------------

BINS = 2048
DISTRIBUTIONS = {
    "normal": lambda g, n: g.normal(size=n),
    "relu": lambda g, n: np.maximum(g.normal(size=n), 0.0),
    "heavy tails": lambda g, n: g.standard_t(3, size=n),
    "one-sided": lambda g, n: -g.exponential(size=n),
    "uniform": lambda g, n: g.uniform(-1.0, 3.0, size=n),
    "an outlier": lambda g, n: np.append(g.normal(size=n - 1), 50.0),
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


@pytest.mark.parametrize(("kind", "bits"), [("heavy tails", 3), ("an outlier", 8)])
def test_the_divergence_is_the_least_of_shares(kind, bits):
    values = DISTRIBUTIONS[kind](np.random.default_rng(1), 5_000)
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
