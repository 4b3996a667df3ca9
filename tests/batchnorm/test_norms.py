"""Each form of a batch norm is found, and taken in by the layer before it."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.calibrated import with_random_norms
from tests.batchnorm.checking import EPSILON, TURNED, check_bare, check_together, folded


def conv(b, dtype=tf.float32):
    x = b.data(2, 6, 5, 3, known=(0,), dtype=dtype)
    return tf.nn.conv2d(x, b.weights(3, 3, 3, 4, dtype=dtype), 1, "SAME")


def fused(version, first=False):
    def build(b):
        mean, variance, offset, scale = b.values(4)
        y = tf.transpose(conv(b), [0, 3, 1, 2]) if first else conv(b)
        y = getattr(tf.raw_ops, f"FusedBatchNorm{version}")(
            x=y,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            is_training=False,
            epsilon=EPSILON,
            data_format="NCHW" if first else "NHWC",
        ).y
        return tf.transpose(y, [0, 2, 3, 1]) if first else y

    return build


def along_axis_1(b):
    y = tf.transpose(conv(b), [0, 3, 1, 2])
    shaped = (tf.reshape(t, [1, 4, 1, 1]) for t in b.values(4))
    return tf.nn.batch_normalization(y, *shaped, EPSILON)


def by_hand(norm):
    def build(b):
        mean, variance, offset, scale = b.values(4)
        return norm(conv(b), mean, variance + EPSILON, offset, scale)

    return build


def with_casts(b):
    y = tf.cast(conv(b, tf.float16), tf.float32)
    return tf.cast(b.norm(y), tf.float16)


def of_doubles(b):
    parameters = [f(4, dtype=tf.float64) for f in (b.weights, b.positive, b.weights)]
    y = conv(b, tf.float64)
    return tf.nn.batch_normalization(y, *parameters, None, EPSILON)


def without_root(bias):
    def build(b):
        y = conv(b)
        y = tf.nn.bias_add(y, b.weights(4)) if bias else y
        return y * b.weights(4) + b.weights(4)

    return build


rsqrt = tf.math.rsqrt
FORMS = {
    "fused": fused(""),
    "fused V2": fused("V2"),
    "fused V3": fused("V3"),
    "fused, channels first": fused("V3", first=True),
    "tf.nn": lambda b: b.norm(conv(b)),
    "tf.nn without offset": lambda b: b.norm(conv(b), center=False),
    "tf.nn without scale": lambda b: b.norm(conv(b), scale=False),
    "tf.nn without both": lambda b: b.norm(conv(b), center=False, scale=False),
    "axis 1": along_axis_1,
    "by hand": by_hand(lambda y, m, v, o, s: (y - m) / tf.sqrt(v) * s + o),
    "by hand, scaled first": by_hand(
        lambda y, m, v, o, s: s * (y - m) / tf.sqrt(v) + o
    ),
    "by hand, with a power": by_hand(lambda y, m, v, o, s: (y - m) * v**-0.5 + o),
    "by hand, subtracted": by_hand(lambda y, m, v, o, s: o - (y - m) * rsqrt(v)),
    "by hand, shifted by the mean": by_hand(
        lambda y, m, v, o, s: y * rsqrt(v) * s + (o - m * rsqrt(v) * s)
    ),
    "doubles": of_doubles,
    "without a root": without_root(False),
    "without a root, bias": without_root(True),
}


@TURNED
def test_forms_are_folded(parameters):
    check_together(FORMS, parameters=parameters)


def test_casts_between_layer_and_norm():
    # The weights are rounded to half precision, in the folded graph elsewhere.
    kinds = ["constants", "resource variables"]
    check_together(dict.fromkeys(kinds, with_casts), None, kinds, bound=5e-3)


def layer_norm(b):
    mean, variance = tf.nn.moments(b.data(2, 5, 4), [2], keepdims=True)
    y = tf.nn.batch_normalization(
        b.data(2, 5, 4), mean, variance, b.weights(4), b.positive(4), EPSILON
    )
    return tf.matmul(y, b.weights(2, 4, 3))


NO_NORMS = {
    "behind relu": lambda b: tf.nn.relu(conv(b)) * b.weights(4) + b.weights(4),
    "no addition": lambda b: conv(b) * b.weights(4),
    "scalar": lambda b: conv(b) * tf.constant(2.0) + b.weights(4),
    "layer norm": layer_norm,
}


def test_scaling_elsewhere_and_layer_norms_are_none():
    def check(name, outcome):
        assert not outcome.report.folded
        assert not outcome.report.refused

    check_together(NO_NORMS, check)


def test_weights_that_are_standardized_are_parameters():
    def build(b):
        weights = b.weights(3, 3, 3, 4)
        mean, variance = tf.nn.moments(weights, [0, 1, 2])
        weights = (weights - mean) * tf.math.rsqrt(variance + EPSILON)
        return b.norm(tf.nn.conv2d(b.data(2, 6, 6, 3), weights, 1, "SAME"), 4)

    check_bare(folded(build, "resource variables"))


L = keras.layers
IMAGE = (6, 6, 4)
ROW = (8, 4)
CUBE = (4, 4, 4, 4)


def heads(**options):
    return L.EinsumDense("abcd,de->abce", (6, 6, 3), bias_axes="e", **options)


KERAS = {
    "conv": (IMAGE, partial(L.Conv2D, 6, 3), {}),
    "neither": (IMAGE, partial(L.Conv2D, 6, 3), {"center": False, "scale": False}),
    "strided": (IMAGE, partial(L.Conv2D, 6, 3, 2, "same"), {}),
    "dilated": (IMAGE, partial(L.Conv2D, 6, 2, dilation_rate=2), {}),
    "grouped": (IMAGE, partial(L.Conv2D, 6, 3, groups=2), {}),
    "transposed": (IMAGE, partial(L.Conv2DTranspose, 6, 3, 2), {}),
    "depthwise": (IMAGE, partial(L.DepthwiseConv2D, 3, depth_multiplier=2), {}),
    "separable": (IMAGE, partial(L.SeparableConv2D, 6, 3), {}),
    "row": (ROW, partial(L.Conv1D, 6, 3), {}),
    "grouped row": (ROW, partial(L.Conv1D, 6, 3, groups=2), {}),
    "transposed row": (ROW, partial(L.Conv1DTranspose, 6, 3, 2), {}),
    "depthwise row": (ROW, partial(L.DepthwiseConv1D, 3), {}),
    "separable row": (ROW, partial(L.SeparableConv1D, 6, 3), {}),
    "causal row": (ROW, partial(L.Conv1D, 6, 3, padding="causal"), {}),
    "cube": (CUBE, partial(L.Conv3D, 6, 2), {}),
    "transposed cube": (CUBE, partial(L.Conv3DTranspose, 6, 2, 2), {}),
    "dense": (IMAGE, partial(L.Dense, 6), {}),
    "dense of rank 2": ((4,), partial(L.Dense, 6), {}),
    "einsum": (IMAGE, heads, {}),
}


def keras_fold(cases, bound, policy):
    """Fold layers with norms, as the branches of one model, opened and frozen."""
    inputs, outputs = {}, {}
    for name, (shape, layer, norm) in cases.items():
        name = name.replace(" ", "_")
        x = inputs[name] = keras.Input(shape, name=name)
        y = layer(bias_initializer="uniform", dtype=policy, name=f"{name}_layer")(x)
        y = L.BatchNormalization(dtype=policy, name=f"{name}_norm", **norm)(y)
        outputs[name] = L.LeakyReLU(dtype="float32")(y)
    model = with_random_norms(keras.Model(inputs, outputs))
    random = np.random.default_rng(0)
    x = {
        n: random.normal(size=(2, *i.shape[1:])).astype("f") for n, i in inputs.items()
    }
    expected = model(x, training=False)
    traced = tf.function(lambda x: model(x, training=False), autograph=False)
    specs = {n: tf.TensorSpec(i.shape, name=n) for n, i in inputs.items()}
    opened = ge.model.open(traced.get_concrete_function(specs))
    wrong = {}
    for kind in (opened, opened.freeze()):
        report = fold_batch_norms(kind)
        assert not report.refused
        assert len(report.folded) == len(cases)
        for name, found in kind.run(**x).items():
            error = np.abs(found - expected[name]).max() / np.ptp(expected[name])
            if not error <= bound:
                wrong[name] = error
    assert not wrong


def test_keras_layers_with_variables_and_frozen():
    keras_fold(KERAS, 1e-5, "float32")


def test_keras_layers_of_mixed_precision():
    # Both graphs round weights and results to half precision, at different places.
    cases = {name: KERAS[name] for name in ("conv", "depthwise", "dense")}
    keras_fold(cases, 5e-3, "mixed_float16")


@pytest.mark.parametrize("layer", ("conv", "dense", "mixed precision"))
def test_keras_models_that_were_traced_for_training(layer):
    x = keras.Input((6, 6, 3))
    policy = "mixed_float16" if layer == "mixed precision" else "float32"
    if layer == "dense":
        y = L.Dense(4, dtype=policy)(x)
    else:
        y = L.Conv2D(4, 3, dtype=policy)(x)
    y = L.BatchNormalization(dtype=policy)(y)
    model = with_random_norms(keras.Model(x, L.ReLU(dtype="float32")(y)))
    value = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    expected = model(value, training=False).numpy()
    traced = tf.function(lambda x: model(x, training=True), autograph=False)
    opened = ge.model.open(traced.get_concrete_function(tf.TensorSpec((None, 6, 6, 3))))
    (refused,) = fold_batch_norms(opened).refused
    assert "is_training=True" in refused.reason
    report = fold_batch_norms(opened, assume_inference=True)
    assert len(report.folded) == 1, report
    (found,) = opened.run(x=value).values()
    bound = 1e-5 if policy == "float32" else 5e-3
    assert np.abs(found - expected).max() <= bound * np.ptp(expected)
