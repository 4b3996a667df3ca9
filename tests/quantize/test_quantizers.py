"""The quantizers compute what numpy does, in graphs and in functions."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import verify
from geutil.quantize import fixed_quantize, last_value_quantize, moving_avg_quantize
from geutil.quantize.spec import nudged
from tests.quantize.tiny import (
    averaged,
    check_fake_quant,
    close,
    ends,
    fake_quant,
    fake_quants,
    of_ranges,
    passes,
    session,
    types,
)
from tests.settings import default_graph, evaluate, needs_eager
from tests.thorough import crossed

v1 = tf.compat.v1
# A number of numpy is a number.
BITS = (2, 4, np.int64(8), 16)
LEARNING = {"last": last_value_quantize, "average": moving_avg_quantize}


def _data(seed=0, shape=(40, 5)):
    random = np.random.default_rng(seed)
    return np.float32(random.normal(size=shape) * random.uniform(0.5, 3.0, shape[-1]))


def _ends(x, per_channel, symmetric, narrow, bits):
    """Return the range of a batch, by the issue's words for symmetric ranges."""
    axes = tuple(range(x.ndim - 1)) if per_channel else None
    low, high = ends(x, axes)
    if not symmetric:
        return low, high
    ratio = 1.0 if narrow else (2 ** (bits - 1) - 1) / 2 ** (bits - 1)
    size = np.maximum(-low, high / ratio)
    return -size, size * ratio


def test_nudged_and_the_reference_of_these_tests_are_what_fake_quant_ops_do():
    low, high = nudged(-0.1, 6.3, 8)
    assert (round(float(low), 5), round(float(high), 5)) == (-0.10039, 6.29961)
    assert nudged(-1.0, 1.0, 8, narrow_range=True) == (-1.0, 1.0)
    assert nudged(0.0, 0.0, 8) == (0.0, 0.0)
    for bits, narrow in itertools.product((2, 3, 4, 8, 12, 16), (False, True)):
        random = np.random.default_rng(bits)
        lows = np.float32(-random.uniform(0, 8, 20))
        highs = np.float32(random.uniform(0.1, 8, 20))
        drawn = np.float32(random.normal(size=(50, 20)) * 4)
        huge = np.float32([[-1e6] * 20, [1e6] * 20, [0] * 20])
        with tf.Graph().as_default() as graph:
            y = tf.quantization.fake_quant_with_min_max_vars_per_channel(
                np.concatenate([huge, drawn]), lows, highs, bits, narrow
            )
        (values,) = evaluate(graph, [y])
        # Zero is one of the values, up to the rounding of a float32.
        expected = *nudged(lows, highs, bits, narrow), np.zeros(20)
        size = np.abs(values).max() * 1e-6
        said = str((bits, narrow))
        np.testing.assert_allclose(values[:3], expected, 0, size, err_msg=said)
        expected = fake_quant(drawn, lows, highs, bits, narrow)
        np.testing.assert_allclose(values[3:], expected, atol=2e-6, err_msg=said)


@pytest.mark.parametrize(
    ("kind", "per_channel", "symmetric", "narrow"),
    crossed(LEARNING, *[(False, True)] * 3),
)
def test_in_training(setting, kind, per_channel, symmetric, narrow):
    x = _data()
    ranges = [{} for _ in BITS]

    def body():
        return [
            LEARNING[kind](
                tf.constant(x),
                per_channel=per_channel,
                num_bits=bits,
                narrow_range=narrow,
                symmetric=symmetric,
                variables=variables,
            )
            for bits, variables in zip(BITS, ranges, strict=True)
        ]

    for bits, value in zip(BITS, setting.run(body), strict=True):
        low, high = _ends(x, per_channel, symmetric, narrow, bits)
        check_fake_quant(value, x, low, high, bits, narrow)
        assert len(np.unique(value[:, 0])) <= 2**bits - narrow


@pytest.mark.parametrize("kind", LEARNING)
def test_channels_are_the_last_axis_of_any_rank(setting, kind):
    shapes = [(7,), (3, 4), (2, 3, 4), (2, 3, 3, 4), (2, 2, 2, 2, 3)]
    data = [_data(1, shape) for shape in shapes]

    def body():
        return [LEARNING[kind](tf.constant(x), per_channel=True) for x in data]

    for x, value in zip(data, setting.run(body), strict=True):
        low, high = ends(x, tuple(range(x.ndim - 1)))
        # A channel of one element is as good as its range.
        np.testing.assert_array_less(low - 1e-9, high)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(low < high, fake_quant(x, low, high), 0)
        close(value, expected, 2e-6)


@pytest.mark.parametrize("kind", LEARNING)
def test_not_in_training_the_range_is_read_and_nothing_is_assigned(setting, kind):
    x, options = _data(), {"init_min": -2.0, "init_max": 1.0, "is_training": False}

    def body():
        made = [LEARNING[kind](tf.constant(x), c, **options) for c in (False, True)]
        graph = default_graph()
        assert types(graph).count("ReadVariableOp") >= 4
        if setting.name == "func_graph":
            assert "AssignVariableOp" not in types(graph)
        return made

    for value in setting.run(body):
        close(value, fake_quant(x, -2.0, 1.0))


def test_fixed(setting):
    x, cases = _data(), list(itertools.product(BITS, (False, True)))

    def body():
        y = [fixed_quantize(tf.constant(x), -1.0, 3.0, None, *case) for case in cases]
        assert y[0].op.name == "FixedQuantize/FakeQuantWithMinMaxArgs"
        assert "VarHandleOp" not in types(y[0].graph)
        return y

    for case, value in zip(cases, setting.run(body), strict=True):
        expected = fake_quant(x, -1.0, 3.0, *case)
        np.testing.assert_allclose(value, expected, 0, 3e-6, err_msg=str(case))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_moving_average_over_steps(scale):
    """The range to start with has no part in it."""
    data = [_data(seed) * np.float32(scale) for seed in range(6)]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5])
        ranges = {}
        y = moving_avg_quantize(
            x, init_min=-1.0, init_max=2.0, ema_decay=0.7, variables=ranges
        )
    with session(graph) as opened:
        for step, batch in enumerate(data):
            value = opened.run(y, {x: batch})
            low, high, learnt = opened.run(list(ranges.values()))
            expected = averaged([ends(b) for b in data[: step + 1]], 0.7)
            np.testing.assert_allclose([low, high], expected, rtol=3e-6)
            close(learnt, 1 - 0.7 ** (step + 1))
            close(value, fake_quant(batch, low, high))
    # In closed form: the weight of each batch, and no start.
    lows = [0.3 * 0.7 ** (5 - i) * ends(batch)[0] for i, batch in enumerate(data)]
    np.testing.assert_allclose(low, sum(lows) / (1 - 0.7**6), rtol=3e-6)


def test_a_range_that_is_given_counts_as_learnt():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5])
        ranges = {}
        moving_avg_quantize(x, False, -2.0, 2.0, is_training=False, variables=ranges)
        y = moving_avg_quantize(
            x, ema_decay=0.5, name_prefix="other", variables=_renamed(ranges, "other")
        )
    with session(graph) as opened:
        opened.run(y, {x: _data()})
        expected = np.mean([(-2.0, 2.0), ends(_data())], 0)
        close(opened.run(list(of_ranges(ranges).values())), expected)


def _renamed(ranges, prefix):
    return {f"{prefix}/{n.rpartition('/')[2]}": v for n, v in ranges.items()}


def test_the_last_value_is_kept_and_read_by_others():
    ranges = {}
    options = {"symmetric": True, "narrow_range": True, "variables": ranges}
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5])
        y = last_value_quantize(x, **options)
        ranges["eval/min"], ranges["eval/max"] = ranges.values()
        z = last_value_quantize(x, is_training=False, name_prefix="eval", **options)
    assert len(ranges) == 4
    with session(graph) as opened:
        for seed in range(3):
            opened.run(y, {x: _data(seed)})
            size = np.abs(_data(seed)).max()
            close(opened.run(list(ranges.values())), [-size, size] * 2)
            value = opened.run(z, {x: _data(7) * 2})
            close(value, fake_quant(_data(7) * 2, -size, size, narrow_range=True))


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", LEARNING)
def test_gradients_go_through_in_range_and_not_into_ranges(
    kind, per_channel, is_training
):
    """Else the extreme values would get those of all that are clipped."""
    x, options = _data(), {"num_bits": 4, "is_training": is_training}
    with tf.Graph().as_default() as graph:
        given, ranges = tf.constant(x), {}
        y = LEARNING[kind](given, per_channel, -1.0, 1.5, variables=ranges, **options)
        (gradient,) = tf.gradients(y, given, tf.constant(_data(1)))
    with session(graph) as opened:
        actual = opened.run(gradient)
        low, high = opened.run(list(of_ranges(ranges).values()))
    if not is_training:
        assert (low.min(), high.max()) == (-1.0, 1.5)
    expected = _data(1) * passes(x, low, high, 4)
    np.testing.assert_array_equal(actual, expected)
    # Ranges that are learnt clip little.
    least = 0 if is_training else 0.05
    assert least < np.mean(expected == 0) < 0.95


def test_names_and_collections():
    with tf.Graph().as_default() as graph:
        x = tf.constant(_data())
        with tf.name_scope("a"):
            moving_avg_quantize(x, vars_collection="mine")
            moving_avg_quantize(x, name_prefix="act_quant")
        last_value_quantize(x, vars_collection=v1.GraphKeys.GLOBAL_VARIABLES)
        names = [
            f"{scope}/{end}"
            for scope, counts in (
                ("a/MovingAvgQuantize", ["learnt"]),
                ("a/act_quant", ["learnt"]),
                ("LastValueQuant", []),
            )
            for end in ("min", "max", *counts)
        ]
        assert [v.op.name for v in v1.global_variables()] == names
        assert [v.op.name for v in graph.get_collection("mine")] == names[:2]
        assert v1.trainable_variables() == []
        # Arguments by place are those of old.
        last_value_quantize(x, False, -1.0, 1.0, "old", "last")
        moving_avg_quantize(x, False, -1.0, 1.0, 0.9, "old", "average")
        moving_avg_quantize(x, vars_collection=None)
        listed = [v.op.name for v in graph.get_collection("old")]
        assert listed == ["last/min", "last/max", "average/min", "average/max"]
        averages = graph.get_collection(v1.GraphKeys.MOVING_AVERAGE_VARIABLES)
        assert [v.op.name for v in averages] == names[3:5]
        scopes = [op.name.rpartition("/")[0] for op in fake_quants(graph)]
        assert scopes[:3] == ["a/MovingAvgQuantize", "a/act_quant", "LastValueQuant"]
        verify(graph)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", LEARNING)
def test_a_range_to_start_with_may_be_empty(kind, is_training):
    x = _data()
    with tf.Graph().as_default() as graph:
        y = LEARNING[kind](
            tf.constant(x), init_min=0.0, init_max=0.0, is_training=is_training
        )
    with session(graph) as opened:
        expected = fake_quant(x, *ends(x)) if is_training else np.zeros_like(x)
        close(opened.run(y), expected)


FLOAT = np.float32([1.0, 2.0])
REFUSED = {
    "bits 1": (lambda x: last_value_quantize(x, num_bits=1), "num_bits=1"),
    "bits 17": (lambda x: moving_avg_quantize(x, num_bits=17), "num_bits=17"),
    "bits 17 fixed": (lambda x: fixed_quantize(x, num_bits=17), "num_bits=17"),
    "bits 8.0": (lambda x: fixed_quantize(x, num_bits=8.0), "whole number"),
    "bits '8'": (lambda x: last_value_quantize(x, num_bits="8"), "whole number"),
    "bits True": (lambda x: last_value_quantize(x, num_bits=True), "whole number"),
    "bits None": (lambda x: moving_avg_quantize(x, num_bits=None), "whole number"),
    "decay": (lambda x: moving_avg_quantize(x, ema_decay=1.0), "ema_decay=1.0"),
    "no zero": (lambda x: last_value_quantize(x, init_min=1.0), "init_min=1.0"),
    "empty": (lambda x: fixed_quantize(x, 0.0, 0.0), "no range"),
    "swapped": (lambda x: fixed_quantize(x, 3.0, -3.0), "no range"),
    "shape": (
        lambda x: last_value_quantize(
            x, per_channel=True, variables={"LastValueQuant/min": tf.Variable([1.0])}
        ),
        r"'LastValueQuant/min' is given with shape \(1,\)",
    ),
}


def test_refused_numbers_channels_and_types():
    for call, message in REFUSED.values():
        with tf.Graph().as_default(), pytest.raises(QuantizeError, match=message):
            call(tf.constant(FLOAT))
    for shape in [(), (None,), None]:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, shape, "x")
            with pytest.raises(QuantizeError, match=r"'x:0'.*per_channel=False"):
                last_value_quantize(x, per_channel=True)
    for dtype in ("float16", "float64", "int32"):
        with tf.Graph().as_default():
            x = tf.constant([1], dtype, name="x")
            for call in (fixed_quantize, last_value_quantize, moving_avg_quantize):
                with pytest.raises(ArgumentTypeError, match=f"'x:0'.*{dtype}.*cast"):
                    call(x)
    with tf.Graph().as_default():
        x = tf.constant(FLOAT, name="x")
    with tf.Graph().as_default(), pytest.raises(ArgumentTypeError, match="as_default"):
        fixed_quantize(x)


@needs_eager
@pytest.mark.parametrize("value", [FLOAT, "eager", 1.0], ids=["array", "eager", "1.0"])
def test_no_tensor_of_a_graph_is_refused(value):
    value = tf.constant(FLOAT) if isinstance(value, str) else value
    with pytest.raises(ArgumentTypeError, match=r"tf\.Tensor of a graph"):
        moving_avg_quantize(value)
