"""Each form of a batch norm is found, and taken in by the layer before it."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import (
    EPSILON,
    PARAMETERS,
    check_bare,
    folded,
)
from tests.batchnorm.networks import with_random_norms
from tests.thorough import crossed


def conv(b, dtype=tf.float32):
    x = b.data(2, 6, 5, 3, known=(0,), dtype=dtype)
    return tf.nn.conv2d(x, b.weights(3, 3, 3, 4, dtype=dtype), 1, "SAME")


def fused(version, **options):
    def build(b):
        inputs = {
            "scale": b.positive(4),
            "offset": b.weights(4),
            "mean": b.weights(4),
            "variance": b.positive(4),
        }
        op = getattr(tf.raw_ops, f"FusedBatchNorm{version}")
        return op(x=conv(b), **inputs, is_training=False, epsilon=EPSILON, **options).y

    return build


def fused_with_channels_first(b):
    y = tf.compat.v1.nn.fused_batch_norm(
        tf.transpose(conv(b), [0, 3, 1, 2]),
        b.positive(4),
        b.weights(4),
        b.weights(4),
        b.positive(4),
        data_format="NCHW",
        is_training=False,
    )[0]
    return tf.transpose(y, [0, 2, 3, 1])


def of_tensorflow(center, scale):
    return lambda b: b.norm(conv(b), 4, center=center, scale=scale)


def along_axis_1(b):
    y = tf.transpose(conv(b), [0, 3, 1, 2])
    mean, variance, offset, scale = (
        tf.reshape(t, [1, 4, 1, 1])
        for t in (b.weights(4), b.positive(4), b.weights(4), b.positive(4))
    )
    return tf.nn.batch_normalization(y, mean, variance, offset, scale, EPSILON)


def by_hand(b):
    y, mean, variance = conv(b), b.weights(4), b.positive(4)
    return (y - mean) / tf.sqrt(variance + EPSILON) * b.positive(4) + b.weights(4)


def by_hand_scaled_first(b):
    y, mean, variance = conv(b), b.weights(4), b.positive(4)
    return b.positive(4) * (y - mean) / tf.sqrt(variance + EPSILON) + b.weights(4)


def by_hand_with_power(b):
    y, mean, variance = conv(b), b.weights(4), b.positive(4)
    return (y - mean) * tf.pow(EPSILON + variance, -0.5) + b.weights(4)


def by_hand_turned(b):
    y, mean, variance = conv(b), b.weights(4), b.positive(4)
    return b.weights(4) - (y - mean) * tf.math.rsqrt(variance + EPSILON)


def with_casts(b):
    y = tf.cast(conv(b, tf.float16), tf.float32)
    return tf.cast(b.norm(y, 4), tf.float16)


def by_hand_shifted_by_the_mean(b):
    y, mean, root = conv(b), b.weights(4), tf.math.rsqrt(b.positive(4) + EPSILON)
    scale = b.positive(4)
    return y * root * scale + (b.weights(4) - mean * root * scale)


def of_doubles(b):
    parameters = [f(4, dtype=tf.float64) for f in (b.weights, b.positive, b.weights)]
    y = conv(b, tf.float64)
    return tf.nn.batch_normalization(y, *parameters, None, EPSILON)


FORMS = {
    "fused": fused(""),
    "fused V2": fused("V2"),
    "fused V3": fused("V3"),
    "fused, channels first": fused_with_channels_first,
    "tf.nn": of_tensorflow(True, True),
    "tf.nn without offset": of_tensorflow(False, True),
    "tf.nn without scale": of_tensorflow(True, False),
    "tf.nn without both": of_tensorflow(False, False),
    "axis 1": along_axis_1,
    "by hand": by_hand,
    "by hand, scaled first": by_hand_scaled_first,
    "by hand, with a power": by_hand_with_power,
    "by hand, subtracted": by_hand_turned,
    "by hand, shifted by the mean": by_hand_shifted_by_the_mean,
    "doubles": of_doubles,
}


@pytest.mark.parametrize(("form", "parameters"), crossed(FORMS, PARAMETERS, together=1))
def test_forms_are_folded(form, parameters):
    check_bare(folded(FORMS[form], parameters))


@pytest.mark.parametrize("parameters", ("constants", "resource variables"))
def test_casts_between_layer_and_norm(parameters):
    # The weights are rounded to half precision, in the folded graph elsewhere.
    check_bare(folded(with_casts, parameters, bound=5e-3))


@pytest.mark.parametrize("bias", (False, True))
def test_what_constant_folding_left_of_a_norm(bias):
    def build(b):
        y = conv(b)
        y = tf.nn.bias_add(y, b.weights(4)) if bias else y
        return y * b.weights(4) + b.weights(4)

    check_bare(folded(build))


@pytest.mark.parametrize("form", ("behind relu", "no addition", "variables", "scalar"))
def test_scaling_by_constants_elsewhere_is_no_norm(form):
    def build(b):
        y = tf.nn.relu(conv(b)) if form == "behind relu" else conv(b)
        y = y * (tf.constant(2.0) if form == "scalar" else b.weights(4))
        return y if form == "no addition" else y + b.weights(4)

    parameters = "resource variables" if form == "variables" else "constants"
    report = folded(build, parameters).report
    assert not report.folded
    assert not report.refused


def test_layer_norms_and_weight_norms_are_none():
    def build(b):
        mean, variance = tf.nn.moments(b.data(2, 5, 4), [2], keepdims=True)
        y = tf.nn.batch_normalization(
            b.data(2, 5, 4), mean, variance, b.weights(4), b.positive(4), EPSILON
        )
        return tf.matmul(y, b.weights(2, 4, 3))

    report = folded(build).report
    assert not report.folded
    assert not report.refused


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
    "no scale": (IMAGE, partial(L.Conv2D, 6, 3), {"scale": False}),
    "no center": (IMAGE, partial(L.Conv2D, 6, 3), {"center": False}),
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


def keras_fold(shape, layer, norm, bound=1e-5, policy="float32"):
    x = keras.Input(shape)
    y = layer(bias_initializer="uniform", dtype=policy)(x)
    y = L.BatchNormalization(dtype=policy, **norm)(y)
    model = with_random_norms(keras.Model(x, L.LeakyReLU(dtype="float32")(y)))
    value = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    expected = model(value, training=False).numpy()
    traced = tf.function(lambda x: model(x, training=False), autograph=False)
    concrete = traced.get_concrete_function(tf.TensorSpec((None, *shape)))
    opened = ge.model.open(concrete)
    for kind in (opened, opened.freeze()):
        report = fold_batch_norms(kind)
        assert len(report.folded) == 1, report
        assert not report.refused
        (found,) = kind.run(x=value).values()
        assert np.abs(found - expected).max() <= bound * np.ptp(expected)


@pytest.mark.parametrize("case", KERAS)
def test_keras_layers_with_variables_and_frozen(case):
    keras_fold(*KERAS[case])


@pytest.mark.parametrize("case", ("conv", "depthwise", "dense"))
def test_keras_layers_of_mixed_precision(case):
    # Both graphs round weights and results to half precision, at different places.
    keras_fold(*KERAS[case], bound=5e-3, policy="mixed_float16")
