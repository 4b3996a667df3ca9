"""Each form of a batch norm is found, and taken in by the layer before it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import fold_batch_norms
from tests.batchnorm.checking import (
    EPSILON,
    PARAMETERS,
    Builder,
    check_bare,
    data_types,
    folded,
    multiplications,
)
from tests.batchnorm.networks import with_random_norms


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


def fused_nchw(b):
    y = tf.transpose(conv(b), [0, 3, 1, 2])
    op = tf.raw_ops.FusedBatchNormV3(
        x=y,
        scale=b.positive(4),
        offset=b.weights(4),
        mean=b.weights(4),
        variance=b.positive(4),
        is_training=False,
        data_format="NCHW",
    )
    # The processor knows this op for NHWC only; the ops of a norm run for both.
    return op.y


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


def of_doubles(b):
    parameters = [f(4, dtype=tf.float64) for f in (b.weights, b.positive, b.weights)]
    y = conv(b, tf.float64)
    return tf.nn.batch_normalization(y, *parameters, None, EPSILON)


FORMS = {
    "fused": fused(""),
    "fused V2": fused("V2"),
    "fused V3": fused("V3"),
    "tf.nn": of_tensorflow(True, True),
    "tf.nn without offset": of_tensorflow(False, True),
    "tf.nn without scale": of_tensorflow(True, False),
    "tf.nn without both": of_tensorflow(False, False),
    "axis 1": along_axis_1,
    "by hand": by_hand,
    "by hand, scaled first": by_hand_scaled_first,
    "by hand, with a power": by_hand_with_power,
    "by hand, subtracted": by_hand_turned,
    "doubles": of_doubles,
}


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_folded(form, parameters):
    check_bare(folded(FORMS[form], parameters))


@pytest.mark.parametrize("parameters", ("constants", "resource variables"))
def test_casts_between_layer_and_norm(parameters):
    # The weights are rounded to half precision, in the folded graph elsewhere.
    check_bare(folded(with_casts, parameters, bound=5e-3))


def test_channels_first_in_a_fused_norm():
    with tf.Graph().as_default() as graph:
        tf.nn.relu(fused_nchw(Builder()), name="out")
    report = fold_batch_norms(graph)
    assert len(report.folded) == 1, report
    types = data_types(graph)
    assert not multiplications(types)
    assert types["BiasAdd"] == 1


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


def keras_model(layer, **options):
    x = keras.Input((6, 6, 4), batch_size=options.pop("batch", None))
    y = keras.layers.BatchNormalization(**options)(layer(x))
    return with_random_norms(keras.Model(x, keras.layers.ReLU()(y)))


KERAS = {
    "conv": ({"filters": 6, "kernel_size": 3}, {}, keras.layers.Conv2D),
    "no scale": (
        {"filters": 6, "kernel_size": 3},
        {"scale": False},
        keras.layers.Conv2D,
    ),
    "no center": (
        {"filters": 6, "kernel_size": 3},
        {"center": False},
        keras.layers.Conv2D,
    ),
    "neither": (
        {"filters": 6, "kernel_size": 3},
        {"center": False, "scale": False},
        keras.layers.Conv2D,
    ),
    "dilated": (
        {"filters": 6, "kernel_size": 2, "dilation_rate": 2},
        {},
        keras.layers.Conv2D,
    ),
    "grouped": ({"filters": 6, "kernel_size": 3, "groups": 2}, {}, keras.layers.Conv2D),
    "transposed": (
        {"filters": 6, "kernel_size": 3, "strides": 2},
        {},
        keras.layers.Conv2DTranspose,
    ),
    "depthwise": ({"kernel_size": 3}, {}, keras.layers.DepthwiseConv2D),
    "separable": ({"filters": 6, "kernel_size": 3}, {}, keras.layers.SeparableConv2D),
    "dense": ({"units": 6}, {}, keras.layers.Dense),
    "einsum": (
        {"equation": "abcd,de->abce", "output_shape": (6, 6, 3), "bias_axes": "e"},
        {},
        keras.layers.EinsumDense,
    ),
}


@pytest.mark.parametrize("case", KERAS)
def test_keras_layers(case):
    options, norm, kind = KERAS[case]
    model = keras_model(kind(**options, bias_initializer="uniform"), **norm)
    value = np.random.default_rng(0).normal(size=(2, 6, 6, 4)).astype(np.float32)
    expected = model(value, training=False).numpy()
    traced = tf.function(lambda x: model(x, training=False), autograph=False)
    concrete = traced.get_concrete_function(tf.TensorSpec((None, 6, 6, 4)))
    opened = ge.model.open(concrete)
    report = fold_batch_norms(opened)
    assert len(report.folded) == 1, report
    assert not report.refused
    (found,) = opened.run(x=value).values()
    assert np.abs(found - expected).max() <= 1e-5 * np.ptp(expected)
