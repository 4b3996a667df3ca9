import keras
import numpy as np
import tensorflow as tf

import geutil as ge
from geutil.rewrite import rewrite
from geutil.rewrite.rules import dropout_removal
from tests.graph.building import snapshot
from tests.settings import default_graph, needs_eager
from tests.thorough import is_quick

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
RANDOM = {"RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"}


def with_a_rate_tensor(x):
    return tf.nn.dropout(x, rate=tf.cast(tf.reduce_sum(x * 0.0) + 0.3, x.dtype))


def stateless(x):
    return tf.nn.experimental.stateless_dropout(x, rate=0.3, seed=[1, 2])


def of_earlier_releases(x):
    mask = tf.random.uniform(tf.shape(x), dtype=x.dtype) >= 0.2
    return x * tf.constant(1.25, x.dtype) * tf.cast(mask, x.dtype)


def of_version_1(x):
    keep = tf.constant(0.7, x.dtype)
    low, high = tf.constant(0.0, x.dtype), tf.constant(1.0, x.dtype)
    drawn = tf.raw_ops.RandomUniform(shape=tf.shape(x), dtype=x.dtype)
    uniform = tf.raw_ops.Add(x=drawn * (high - low), y=low)
    return x / keep * tf.floor(tf.raw_ops.Add(x=keep, y=uniform))


def rows_of(x):
    return tf.random.uniform([tf.shape(x)[0], 1], dtype=x.dtype)


def number(x, value):
    return tf.constant(value, x.dtype)


# Stochastic depth keeps whole rows; everybody writes it in another order.
def cast_rows_of(x):
    """Draw as Keras 3 does between integers, or in half precision."""
    low, high = (tf.cast(tf.constant(bound), x.dtype) for bound in (0, 1))
    return rows_of(x) * (high - low) + low


def rounded(x):
    """Round as quantization for training does, where TensorFlow can."""
    if x.dtype != tf.float32:
        return tf.identity(x)
    return tf.quantization.fake_quant_with_min_max_args(x, -9.0, 9.0)


def half_rows_of(x):
    return tf.cast(tf.random.uniform([tf.shape(x)[0], 1], dtype=tf.half), x.dtype)


STOCHASTIC_DEPTH = {
    "above the rate": lambda x: (x / 0.7) * tf.cast(rows_of(x) > 0.3, x.dtype),
    "the rate below": lambda x: (
        (x / 0.7) * tf.cast(tf.less(number(x, 0.3), rows_of(x)), x.dtype)
    ),
    "below keep_prob": lambda x: x * tf.cast(rows_of(x) < 0.7, x.dtype) / 0.7,
    "keep_prob above": lambda x: (
        tf.cast(tf.greater(number(x, 0.7), rows_of(x)), x.dtype) * x / 0.7
    ),
    "a scaled mask": lambda x: x * (tf.cast(rows_of(x) >= 0.3, x.dtype) / 0.7),
    "a floor": lambda x: (x / 0.7) * tf.floor(0.7 + rows_of(x)),
    "a scaled floor": lambda x: x * (tf.floor(rows_of(x) + 0.7) * (1 / 0.7)),
    "bounds that are cast": lambda x: (x / 0.7) * tf.floor(0.7 + cast_rows_of(x)),
    "chosen above the rate": lambda x: tf.where(rows_of(x) > 0.3, x / 0.7, 0.0),
    "chosen below keep_prob": lambda x: tf.where(rows_of(x) < 0.7, x / 0.7, 0.0),
    "dropped below the rate": lambda x: tf.where(
        rows_of(x) < 0.3, number(x, 0.0), x / 0.7
    ),
    "dropped above keep_prob": lambda x: tf.where(
        rows_of(x) >= 0.7, number(x, 0.0), x / 0.7
    ),
    "scaled behind a choice": lambda x: tf.where(rows_of(x) < 0.7, x, 0.0) / 0.7,
    "zeros like x": lambda x: tf.where(rows_of(x) < 0.7, x / 0.7, tf.zeros_like(x)),
    "a chosen mask": lambda x: (
        x * tf.where(rows_of(x) < 0.7, number(x, 1.0), 0.0) / 0.7
    ),
    "a chosen scale": lambda x: x * tf.where(rows_of(x) < 0.8, number(x, 1.25), 0.0),
    "a mask of a floor": lambda x: tf.where(
        tf.cast(tf.floor(0.7 + rows_of(x)), tf.bool), x / 0.7, 0.0
    ),
    "no division by zero": lambda x: (
        tf.math.divide_no_nan(x, number(x, 0.7)) * tf.floor(0.7 + rows_of(x))
    ),
    "turned": lambda x: x * tf.cast(~(rows_of(x) >= 0.7), x.dtype) / 0.7,
    "half precision": lambda x: x / 0.7 * tf.floor(0.7 + half_rows_of(x)),
    "another shape": lambda x: (
        x
        / 0.7
        * tf.reshape(tf.floor(0.7 + tf.random.uniform([4], 0, 1, x.dtype)), [4, 1])
    ),
    "one number": lambda x: (
        x / 0.7 * tf.floor(0.7 + tf.random.uniform([], dtype=x.dtype))
    ),
    "as it is": lambda x: (
        x
        / 0.7
        * tf.broadcast_to(tf.stop_gradient(tf.floor(0.7 + rows_of(x))), tf.shape(x))
    ),
    "rounded": lambda x: (
        rounded(x / rounded(number(x, 0.7)))
        * rounded(tf.floor(0.7 + rounded(rows_of(x))))
    ),
}
BUILDERS = {
    **STOCHASTIC_DEPTH,
    "tf.nn.dropout": lambda x: tf.nn.dropout(x, rate=0.3),
    "noise shape": lambda x: tf.nn.dropout(x, rate=0.3, noise_shape=[4, 1]),
    "v1 keep_prob": lambda x: tf.compat.v1.nn.dropout(x, keep_prob=0.7),
    "v1 rate": lambda x: tf.compat.v1.nn.dropout(x, rate=0.3),
    "rate tensor": with_a_rate_tensor,
    "stateless": stateless,
    "earlier releases": of_earlier_releases,
    "version 1": of_version_1,
}


def test_dropout_passes_its_input_on(setting):
    dtypes = [tf.float32, tf.float16]
    cases = [
        (name, dtypes[(place + turn) % 2])
        for turn in range(1 if is_quick() else 2)
        for place, name in enumerate(BUILDERS)
    ]

    def body():
        results = {}
        for name, dtype in cases:
            x = tf.cast(tf.constant(X), dtype)
            results[name, dtype] = tf.identity(BUILDERS[name](x))
        for case, y in results.items():
            assert {op.type for op in ge.get_backward_walk_ops(y)} & RANDOM, case
        report = rewrite(default_graph(), dropout_removal(), debug=True)
        assert len(report.rewritten) == len(cases)
        random = {
            case
            for case, y in results.items()
            if {op.type for op in ge.get_backward_walk_ops(y)} & RANDOM
        }
        assert random == set()
        assert not rewrite(default_graph(), dropout_removal()).rewritten
        return [tf.cast(y, tf.float32) for y in results.values()]

    for (name, dtype), value in zip(cases, setting.run(body), strict=True):
        expected = X.astype(dtype.as_numpy_dtype).astype(np.float32)
        np.testing.assert_array_equal(value, expected, name)


LAYERS = {
    "Dropout": lambda: keras.layers.Dropout(0.5),
    "noise shape": lambda: keras.layers.Dropout(0.3, noise_shape=(None, 1, 1), seed=3),
    "SpatialDropout1D": lambda: keras.layers.SpatialDropout1D(0.3),
}


@needs_eager
def test_keras_layers_in_training():
    x = keras.Input((3, 8))
    hidden = keras.layers.Dense(8, activation="relu")(x)
    ends = {n: keras.layers.Dense(2)(make()(hidden)) for n, make in LAYERS.items()}
    model = keras.Model(x, ends)
    reports = []

    @tf.function
    def training(x):
        y = {n: tf.identity(t) for n, t in model(x, training=True).items()}
        reports.append(rewrite(default_graph(), dropout_removal(), debug=True))
        return y

    data = X.reshape(-1, 1, 8).repeat(3, axis=1)
    values = training(tf.constant(data))
    assert len(reports[0].rewritten) == len(LAYERS)
    # The reference is Keras' own inference.
    for name, expected in model(data, training=False).items():
        np.testing.assert_allclose(
            values[name], expected, rtol=1e-5, atol=1e-6, err_msg=name
        )


def chosen(x, otherwise=0.0, scale=1.25, rate=0.2, **bounds):
    mask = tf.random.uniform(tf.shape(x), **bounds) >= rate
    return tf.where(mask, x * scale, otherwise)


REFUSED = {
    "scaled by 2.0, with a rate of 0.30": lambda x: (
        (x / 0.5) * tf.cast(rows_of(x) > 0.3, x.dtype)
    ),
    "scaled by 3.3": lambda x: (x / 0.3) * tf.cast(rows_of(x) < 0.7, x.dtype),
    "scaled by 1.4": lambda x: tf.where(rows_of(x) < 0.7, 0.0, x / 0.7),
    "what is kept is scaled by 2.0, with a rate of 0.2": lambda x: chosen(x, scale=2.0),
    "go up to 2.0, not 1": lambda x: chosen(x, maxval=2.0),
    "is 0.5, not 0": lambda x: chosen(x, minval=0.5, maxval=1.5),
    "is 7.0, not 0": lambda x: chosen(x, otherwise=7.0),
    "is no constant, but what scales is": lambda x: chosen(x, rate=tf.reduce_sum(x)),
}


def test_what_only_looks_like_dropout_is_refused():
    wrong = {}
    for words, build in REFUSED.items():
        with tf.Graph().as_default() as graph:
            tf.identity(build(tf.constant(X)))
        before = snapshot(graph)
        report = rewrite(graph, dropout_removal())
        if report.rewritten or words not in report.refused[0].reason:
            wrong[words] = str(report)
        assert snapshot(graph) == before
    assert wrong == {}


def test_noise_and_masks_that_are_not_balanced_are_no_candidates():
    with tf.Graph().as_default() as graph:
        x = tf.constant(X)
        tf.identity(x * tf.random.normal([4, 8], 1.0))
        y = tf.nn.dropout(x, rate=0.3)
    report = rewrite(graph, dropout_removal())
    assert not report.refused
    # What is fetched is reported.
    assert list(report.replaced) == [y]
    assert report.current(y) is x
    with graph.as_default():
        tf.identity(x * tf.cast(rows_of(x) > 0.3, x.dtype))
    assert not rewrite(graph, dropout_removal()).rewritten
