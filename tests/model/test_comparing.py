"""Comparing models: the numbers are numpy's own."""

import functools
import math
import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from geutil import model
from tests.model.refusal_tables import not_refused
from tests.thorough import examples


def opened(function, *specs):
    specs = specs or (tf.TensorSpec([None, 4], name="x"),)
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return model.open(traced)


def named(value, **others):
    return {"y": value, **others}


def test_equal_models():
    m = opened(lambda x: named(x * 2.0))
    result = m.compare(opened(lambda x: named(x + x)))
    assert result
    assert result.equal
    assert result.samples == 8
    assert str(result).startswith(
        "equal on 24 sample(s) in 8 batch(es) (rtol 1e-05, atol 1e-06)"
    )
    assert result.differences["y"].index is None


def test_largest_differences_and_where():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    off = np.zeros([3, 4], np.float32)
    off[1, 2], off[2, 3] = 0.25, -0.5
    spec = tf.TensorSpec([3, 4], name="x")
    m = opened(lambda x: named(x + off, z=x), spec)
    n = opened(lambda x: named(x, z=x), spec)
    result = m.compare(n, {"x": x})
    found = result.differences["y"]
    assert not result
    assert not found.equal
    assert result.differences["z"].equal
    assert found.absolute == 0.5
    assert found.relative == pytest.approx(max(0.25 / 6, 0.5 / 11))
    assert found.index == (2, 3)
    assert found.values == (10.5, 11.0)
    assert "y: largest difference 0.5 absolute" in str(result)
    # The worst of several inputs.
    several = [{"x": np.full([3, 4], v, np.float32)} for v in (1.0, 8.0, 2.0)]
    scaled = opened(lambda x: named(x * 1.5, z=x), spec)
    result = scaled.compare(n, iter(several))
    assert result.samples == 3
    assert result.differences["y"].absolute == 4.0
    assert result.differences["y"].sample == 1


def test_a_difference_from_a_constant_output_proves_something():
    m, n = opened(lambda x: named(x * 0.0 + 1.0)), opened(lambda x: named(x * 0.0))
    nothing = "does not change over 24 samples: this comparison proves nothing"
    assert str(m.compare(m)).endswith(nothing)
    assert str(m.compare(n)).endswith("does not change over 24 samples")


def test_tolerances():
    m, n = opened(lambda x: named(x * 1.05)), opened(named)
    x = np.full([1, 4], 10.0, np.float32)
    for rtol, atol in ((0.0, 0.0), (0.1, 0.0), (0.0, 1.0), (0.01, 0.0)):
        result = m.compare(n, {"x": x}, rtol=rtol, atol=atol)
        assert bool(result) is (0.1 in (rtol, atol) or atol == 1.0), (rtol, atol)


def test_outputs_in_order_where_no_name_is_shared():
    m = opened(lambda x: {"a": x, "b": 2 * x})
    result = m.compare(opened(lambda x: {"p": x, "q": 2 * x}))
    assert result and list(result.differences) == ["a", "b"]
    for function in (lambda x: {"b": x, "c": x}, lambda x: {"a": x, "b": x, "c": x}):
        with pytest.raises(model.ModelError, match="the outputs do not match"):
            m.compare(opened(function))


def of_two(x, z):
    return {"y": x + z}


def test_inputs_of_any_name_where_there_is_but_one():
    m, other = opened(named), opened(named, tf.TensorSpec([3, 4], name="z"))
    assert m.compare(other, samples=1) and other.compare(m, samples=1)
    assert m.compare(other, {"x": np.ones([3, 4], np.float32)})
    doubled = opened(lambda z: named(2 * z), tf.TensorSpec([None, 4], name="z"))
    assert not m.compare(doubled)


def test_refusals():
    m = opened(named)
    others = {
        tf.TensorSpec([None, 5], name="x"): "nothing fits both",
        tf.TensorSpec([None, 4], tf.float64, name="x"): "nothing fits both",
    }
    cases = [
        (spec, partial(m.compare, opened(named, spec)), message)
        for spec, message in others.items()
    ]
    two = [tf.TensorSpec([None, 4], name=name) for name in "xz"]
    cases += [
        ("type", partial(m.compare, "path"), re.escape("geutil.model.open")),
        ("no samples", partial(m.compare, m, samples=0), "draw at least one"),
        ("no data", partial(m.compare, m, []), "the dataset is empty"),
        ("inputs", partial(m.compare, opened(of_two, *two)), "the inputs do not match"),
        ("name", partial(m.compare, m, {"z": 1.0}), r"is for the inputs \['z'\]"),
    ]
    m = opened(
        lambda x: named(tf.gather([1.0], 3 * x)), tf.TensorSpec([3], tf.int32, "x")
    )
    cases.append(("failing", partial(m.compare, m), "pass inputs="))
    assert not_refused(model.ModelError, cases) == {}
    assert m.compare(m, {"x": [0, 0, 0]})


def test_shapes_dtypes_and_texts_that_differ():
    specs = [tf.TensorSpec([None, 4], name="x"), tf.TensorSpec([None], tf.string, "t")]
    m = opened(lambda x, t: named(x, z=x, t=t), *specs)
    n = opened(
        lambda x, t: named(tf.cast(x, tf.float64), z=x[:, :2], t=t + "!"), *specs
    )
    result = m.compare(n)
    assert not result
    assert result.differences["y"].mismatch == "dtype float32 and float64"
    assert result.differences["z"].mismatch == "shape [3, 4] and [3, 2]"
    assert "shape [3, 4] and [3, 2]" in str(result)
    found = result.differences["t"]
    assert found.absolute == math.inf
    assert found.values[1] == found.values[0] + b"!"
    assert m.compare(m)


def test_the_inputs_are_the_same_each_time_and_unknown_batches_follow_known_ones():
    m, n = opened(lambda x: named(tf.sin(x))), opened(lambda x: named(tf.cos(x)))
    assert m.compare(n) == m.compare(n)
    for first, second in ((5, None), (None, 5)):
        m = opened(
            lambda x, z: named(x * z),
            tf.TensorSpec([first, 2], name="x"),
            tf.TensorSpec([second, 2], name="z"),
        )
        assert m.compare(m).differences["y"].mismatch is None


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        (tf.float32, [2, 3], (2, 3)),
        (tf.float16, [None, 3], (3, 3)),
        (tf.bfloat16, [2], (2,)),
        (tf.complex64, [2], (2,)),
        (tf.int64, [None, None], (3, 8)),
        (tf.uint8, [None, None, None, 3], (3, 32, 32, 3)),
        (tf.bool, [], ()),
        (tf.string, [None], (3,)),
        (tf.string, [], ()),
        (tf.float32, None, (3,)),
    ],
)
def test_random_inputs(dtype, shape, size, monkeypatch):
    m = opened(lambda x: {"y": tf.identity(x)}, tf.TensorSpec(shape, dtype, name="x"))
    ((x,),) = (sample.values() for sample in drawn(m, 1, monkeypatch))
    assert np.shape(x) == size
    assert tf.convert_to_tensor(x, dtype).dtype == dtype
    if dtype == tf.int64:
        assert np.unique(x).tolist() == [0, 1]


def drawn(m, samples, monkeypatch):
    """Return the inputs that a model is run on when it is compared with itself."""
    run, found = model.Model.run, []

    def noted(self, **inputs):
        found.append(inputs)
        return run(self, **inputs)

    monkeypatch.setattr(model.Model, "run", noted)
    assert m.compare(m, samples=samples)
    # The other one, and then this one, are run on the same.
    return found[::2]


TABLE = tf.Variable(np.arange(6.0).reshape(3, 2))

INDEXED = {
    "gather": (lambda x: tf.gather(tf.eye(4), x), tf.int32, 4),
    "of a variable": (lambda x: tf.gather(TABLE, x[:, 1:]), tf.int64, 3),
    "along an axis": (lambda x: tf.gather(tf.ones([9, 5]), x, axis=1), tf.int32, 5),
    "the smaller one": (
        lambda x: (tf.gather(tf.eye(4), x), tf.gather(tf.eye(2), x)),
        tf.int32,
        2,
    ),
    "offset": (lambda x: tf.gather(tf.eye(6), tf.reshape(x + 2, [-1])), tf.int32, 4),
    "wrapped around": (
        lambda x: tf.gather(tf.eye(6), tf.where(x < 0, x + 6, x)),
        tf.int32,
        6,
    ),
    "cast": (lambda x: tf.gather(tf.eye(7), tf.cast(x, tf.int32)), tf.float32, 7),
    "n-dimensional": (
        lambda x: tf.gather_nd(tf.ones([5, 3, 2]), tf.stack([x, x], -1)),
        tf.int32,
        3,
    ),
    "one hot": (lambda x: tf.one_hot(x, 8), tf.uint8, 8),
    "segments": (
        lambda x: tf.math.unsorted_segment_sum(tf.ones([3, 4]), x, 5),
        tf.int32,
        5,
    ),
    "labels": (
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
            x, tf.zeros([3, 4, 6])
        ),
        tf.int32,
        6,
    ),
}


def test_numbers_that_index_something_stay_below_its_length(monkeypatch):
    rows = list(INDEXED.values())
    specs = [
        tf.TensorSpec([3, 4], dtype, name=f"x{i}")
        for i, (_, dtype, _) in enumerate(rows)
    ]
    # One that indexes nothing has no bound.
    specs.append(tf.TensorSpec([None, 4], tf.int32, name="free"))

    def function(*inputs):
        results = [row[0](x) for row, x in zip(rows, inputs, strict=False)]
        flat = tf.nest.flatten([*results, tf.cast(inputs[-1], tf.float32) * 2.0])
        return {f"y{i}": y for i, y in enumerate(flat)}

    m = model.open(tf.function(function, specs, autograph=False))
    samples = drawn(m, 20, monkeypatch)
    for i, (*_, bound) in enumerate(rows):
        found = np.floor([sample[f"x{i}"] for sample in samples])
        assert set(found.ravel()) == set(range(bound)), i
    assert np.unique([sample["free"] for sample in samples]).tolist() == [0, 1]


def test_no_random_values():
    m = opened(
        lambda x: {"y": tf.quantization.dequantize(x, 0.0, 1.0)},
        tf.TensorSpec([2], tf.qint8, "x"),
    )
    with pytest.raises(model.ModelError, match="of dtype qint8"):
        m.compare(m)


@functools.cache
def chosen(dtype, index):
    """Return a model that returns one of its two inputs."""
    specs = (tf.TensorSpec(None, dtype, name=name) for name in "ab")
    return opened(lambda *inputs: {"y": tf.identity(inputs[index])}, *specs)


def apart(a, b, rtol, atol):
    """Return the difference of two arrays that two models return."""
    one, other = (chosen(tf.as_dtype(a.dtype), index) for index in (0, 1))
    return one.compare(other, {"a": a, "b": b}, rtol=rtol, atol=atol).differences["y"]


NUMBERS = st.floats(-1e6, 1e6, width=32)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)


@examples(200)
@given(st.data(), st.floats(0, 1), st.floats(0, 10))
def test_numpy_says_the_same(data, rtol, atol):
    shape = data.draw(SHAPES)
    elements = st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, -math.inf]))
    a, b = (
        data.draw(arrays.arrays(np.float32, shape, elements=elements)) for _ in range(2)
    )
    found = apart(a, b, rtol, atol)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert found.equal == np.allclose(x, y, rtol, atol, equal_nan=True)
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.all():
        assert found.absolute == np.abs(x - y).max(initial=0)
        if found.index is not None:
            assert found.values == (a[found.index], b[found.index])
            assert abs(x - y)[found.index] == found.absolute
    elif found.absolute:
        assert math.isinf(found.absolute) or (finite | (x == y)).any()


@pytest.mark.parametrize(
    ("a", "b", "absolute", "equal"),
    [
        ([1, 2], [1, 2], 0.0, True),
        ([2**62, -(2**62)], [-(2**62), -(2**62)], 2.0**63, False),
        ([True, False], [True, True], math.inf, False),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0, True),
        ([math.nan], [1.0], math.inf, False),
        ([math.inf], [-math.inf], math.inf, False),
        ([1 + 1j], [1 + 0j], 1.0, False),
        ([], [], 0.0, True),
    ],
)
def test_special_values(a, b, absolute, equal):
    found = apart(np.array(a), np.array(b), 1e-5, 1e-6)
    assert (found.absolute, found.equal) == (absolute, equal)
