"""Infinities that masks put there, and those that leave no trace."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.quantize.converted import Together, alternate, opened, samples, spec
from tests.quantize.small_networks import prepared
from tests.settings import needs_eager
from tests.thorough import some

pytestmark = needs_eager

ROWS = spec(6, 4)
CAUSAL = np.tril(np.ones((6, 6))) > 0
MATRIX = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def _earlier(x):
    """Return 1 for what comes before, which converter and Grappler cannot know."""
    places = tf.range(tf.shape(x)[0])
    return tf.cast(places[:, None] >= places, tf.float32)


def _products(x):
    return x @ tf.transpose(x)


def _shares(x, logits):
    """Return rows mixed by shares; logits may have an axis more."""
    return tf.reshape(tf.nn.softmax(logits), [6, 6]) @ x


MASKED = {
    "chosen": lambda x: _shares(x, tf.where(CAUSAL, _products(x), -np.inf)),
    "added": lambda x: _shares(x, _products(x) + tf.where(CAUSAL, 0.0, -np.inf)),
    "far added": lambda x: _shares(x, _products(x) + tf.where(CAUSAL, 0.0, -1e9)),
    "far away": lambda x: _shares(
        x, tf.where(CAUSAL[None], tf.reshape(_products(x), [1, 6, 6]), -1e9)
    ),
    "scaled": lambda x: _shares(x, _products(x) + (1.0 - _earlier(x)) * -1e9),
    "added before": lambda x: _shares(
        x, _products(x) + (MATRIX[0, 0] + (1.0 - _earlier(x)) * -1e9)
    ),
    "subtracted": lambda x: _shares(
        x,
        tf.reshape(_products(x), [1, 6, 6])
        - tf.reshape(1e9 * (1.0 - _earlier(x)), [1, 6, 6]),
    ),
    "dead": lambda x: tf.where(x > 0, tf.math.log(tf.nn.relu(x)), x) @ MATRIX,
}


def masked(*names):
    """Return a quantized model of masks, each with an input of its own, and data."""
    inputs = [spec(6, 4, name=f"x{n}") for n in range(len(names))]
    m = opened(
        lambda *xs: {n: MASKED[n](x) for n, x in zip(names, xs, strict=True)}, *inputs
    )
    quantize(m, is_training=False)
    # Small values, of which the lowest is not far from the others.
    return m, [samples(m.inputs, -0.5, 0.5, seed) for seed in range(2)]


METHODS = ("moving_average", "min_max", "percentile", "entropy", "mse")


def check_masks(m, data, method):
    report = calibrate(m, data, method)
    assert np.all(np.isfinite(np.hstack([*map(np.ravel, report.ranges.values())])))
    found = m.run(**data[0])
    tolerance = 0.3 if method in ("entropy", "moving_average") else 0.05
    off = {}
    for (name, y), x in zip(found.items(), data[0].values(), strict=True):
        off[name] = np.abs(y - MASKED[name](tf.constant(x)).numpy()).max()
    # A log of values near zero has no end.
    off.pop("dead", None)
    assert {name: d for name, d in off.items() if d >= tolerance} == {}, method


def test_masks_do_not_count():
    m, data = masked(*MASKED)
    check_masks(m, data, "best")
    comparison = compare_int8(m, to_int8(m), data)
    assert comparison.float_ops == ()
    assert {o.output: o.most for o in comparison.outputs if o.most > 2} == {}


def test_masks_do_not_count_by_any_method():
    """An infinity, a number as good as that, and a log of zeros."""
    m, data = masked("chosen", "far added", "dead")
    for method in METHODS:
        check_masks(m, data, method)


CULPRITS = {
    "a division": (lambda x: tf.nn.relu(x / 0.0) @ MATRIX, "RealDiv"),
    "the input": (lambda x: tf.nn.relu(x) @ MATRIX, "Placeholder"),
    "no share": (
        lambda x: tf.nn.softmax(tf.where(x > 99, x, -np.inf)) @ MATRIX,
        "Softmax",
    ),
}


@pytest.mark.parametrize("case", CULPRITS)
def test_the_op_that_makes_them_is_named(case):
    function, kind = CULPRITS[case]
    m = prepared(opened(function, ROWS))
    x = samples(m.inputs)["a"]
    if case == "the input":
        x[0, 0] = np.inf
    before = {name: v.numpy() for name, v in m.variables.items()}
    with pytest.raises(QuantizeError, match=rf"\({kind}\) is the first.* batch 0"):
        calibrate(m, {"a": x})
    for name, value in before.items():
        np.testing.assert_array_equal(m.variables[name].numpy(), value)


def test_results_that_a_mask_leaves_infinite():
    m = prepared(opened(lambda x: tf.where(x > 0, x @ MATRIX[:, :4], -np.inf), ROWS))
    x = samples(m.inputs)["a"]
    report = calibrate(m, [{"a": x}, {"a": x}])
    y = (x @ MATRIX[:, :4])[x > 0]
    low, high = list(report.ranges.values())[-1]
    assert low <= min(y.min(), 0.0)
    assert high >= y.max() * 0.9
    assert all(np.isfinite(share) for share in report.noise.values())


def test_large_numbers_that_are_no_mask_count():
    def both(x):
        logits = tf.where(CAUSAL, x @ tf.transpose(x), -1e4)
        return {"logits": logits, "shares": tf.nn.softmax(logits)}

    m = prepared(opened(both, ROWS))
    report = calibrate(m, [samples(m.inputs)], "min_max")
    assert min(low for low, _ in report.ranges.values()) == -1e4


def test_a_mask_that_is_an_output_is_not_cut_off():
    def both(x):
        mask = (1.0 - _earlier(x)) * -1e9
        return {"y": tf.nn.softmax(x @ tf.transpose(x) + mask) @ x, "mask": mask}

    data = [samples(opened(both, ROWS).inputs, -0.5, 0.5)]

    def converted(*skipped):
        m = opened(both, ROWS)
        overrides = {f"^{name}$": "skip" for name in skipped}
        quantize(m, is_training=False, overrides=overrides)
        calibrate(m, data, "min_max")
        return m, to_int8(m)

    with pytest.raises(QuantizeError, match=r"TFLite would end the process: ADD"):
        converted()
    for skipped in (["add"], ["mul", "add"], ["mul"]):
        m, blob = converted(*skipped)
        assert compare_int8(m, blob, data).most <= 2, skipped


SCALES = [1e-5, 1e-3, 0.1, 1.0, 250.0, 260.0, 1e6]
COMPARED = {
    "data": lambda y, scale: y > tf.nn.relu(y)[::-1],
    "zero": lambda y, scale: y >= 0.0,
    "a number": lambda y, scale: 0.12 * scale < y,
    "numbers": lambda y, scale: tf.less_equal(y, MATRIX[:, :4] * scale),
    "equal": lambda y, scale: tf.equal(y, tf.nn.relu(y)),
}


def chosen_by(compare, scale):
    function = lambda x: tf.where(compare(x * scale, scale), x, -x)  # noqa: E731
    return function, (spec(4, 4),), {"low": -0.5, "high": 0.5}


def test_comparisons_are_right_at_any_scale():
    cases = {
        f"{case} {SCALES.index(scale)}": chosen_by(COMPARED[case], scale)
        for case, scale in alternate(list(COMPARED)[:-1], SCALES)
    }
    # Else the converter of TensorFlow 2.21 leaves the comparison without its input.
    cases["read by nothing else"] = (
        lambda x, z: tf.where(x > 0, tf.nn.relu(z), tf.nn.relu(x * 3.0)),
        (spec(None, 4), spec(None, 4)),
    )
    parts = Together(cases).parts()
    assert {n: p for n, p in parts.items() if p.floats or p.most > 1} == {}


@pytest.mark.parametrize("scale", some(SCALES, 2))
def test_values_are_equal_at_any_scale(scale):
    m = prepared(opened(chosen_by(COMPARED["equal"], scale)[0], spec(4, 4)))
    data = [samples(m.inputs, -0.5, 0.5, seed) for seed in range(3)]
    calibrate(m, data, "min_max")
    comparison = compare_int8(m, to_int8(m), data)
    assert comparison.float_ops == ()
    assert comparison.most <= 1
