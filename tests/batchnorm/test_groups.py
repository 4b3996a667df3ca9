"""Convolutions by groups of channels, which few of TensorFlow's kernels compute.

Run without oneDNN, too (`tests/gradients/test_processes.py`): there a BiasAdd behind
one is fused into a kernel that takes none, and the gradient of one ends in an error.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.thorough import crossed

CHANNELS, FILTERS = 8, 12
ACTIVATIONS = "identity", "relu", "leaky_relu"


def network(rank, dilation, dtype, activation):
    """Return a function of a convolution by two groups with a norm, and its input."""
    rng = np.random.default_rng(rank)
    shape = [*[3] * rank, CHANNELS // 2, FILTERS]
    kernel = tf.constant(rng.normal(size=shape), dtype)
    scale, offset = (tf.constant(v, dtype) for v in rng.uniform(0.5, 1, (2, FILTERS)))

    @tf.function(
        input_signature=[tf.TensorSpec([None, *[9] * rank, CHANNELS], dtype, "x")],
        autograph=False,
    )
    def layer(x):
        held = tf.nn.convolution(x, kernel, padding="SAME", dilations=dilation)
        held = tf.nn.batch_normalization(held, offset, scale, offset, scale, 1e-3)
        return {"y": activation(held)}

    return layer, rng.normal(size=[4, *[9] * rank, CHANNELS]).astype(dtype)


@pytest.mark.parametrize(
    ("form", "activation", "dtype"),
    crossed([(2, 1), (1, 1), (2, 2)], ACTIVATIONS, ["float32", "float64"], together=1),
)
def test_a_folded_one_runs_and_is_saved(form, activation, dtype, tmp_path):
    layer, x = network(*form, dtype, getattr(tf.nn, activation, tf.identity))
    expected = layer(tf.constant(x))["y"]
    m = geutil_model.open(layer)
    (folded,) = fold_batch_norms(m).folded
    assert "Conv2D" in str(folded)
    np.testing.assert_allclose(m.run(x=x)["y"], expected, rtol=1e-4, atol=1e-4)
    m.save(tmp_path / "saved")
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    found = loaded.signatures["serving_default"](x=tf.constant(x))["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_of_keras_is_trained():
    """XLA compiles it, folded or not: nothing else has its gradient everywhere."""
    layers, found = keras.layers, []
    norm = layers.BatchNormalization(epsilon=0.1)
    stack = [layers.Conv2D(FILTERS, 3, groups=2), norm, layers.ReLU()]
    net = keras.Sequential([keras.Input((9, 9, CHANNELS)), *stack])
    x = np.random.default_rng(0).normal(size=(4, 9, 9, CHANNELS)).astype("f")
    for fold in (False, True):

        @tf.function(autograph=False)
        def step(x, fold=fold):
            y = tf.identity(net(x, training=True))
            loss = tf.reduce_mean(tf.sin(y))
            if fold:
                assert fold_batch_norms(y.graph, is_training=True).folded
            weights = [v.value for v in net.trainable_variables]
            return tf.gradients(loss, [x, *weights])

        found.append(step(x))
    for folded, plain in zip(*found, strict=True):
        np.testing.assert_allclose(folded, plain, rtol=0, atol=1e-6)


def test_calibration_goes_on_where_there_are_no_gradients():
    layer, x = network(2, 1, "float32", tf.nn.relu)
    samples = [{"x": x}, {"x": x[::-1] * 0.9}]
    m = geutil_model.open(layer)
    fold_batch_norms(m)
    quantize(m)
    said = calibrate(m, samples).whole
    try:
        tf.function(lambda x: tf.gradients(layer(x)["y"], x))(tf.constant(x))
    except tf.errors.OpError:
        assert "no gradients of the model: Gradients for grouped" in said
    else:
        assert not said
    assert compare_int8(m, to_int8(m, samples), samples).most <= 1


def test_a_layer_of_keras_without_a_norm_is_quantized():
    first, last = (keras.layers.Conv2D(FILTERS, 3, groups=g) for g in (2, 4))
    x = np.random.default_rng(0).normal(size=(4, 9, 9, CHANNELS)).astype("f")
    inputs = keras.Input((9, 9, CHANNELS), name="x")
    m = geutil_model.open(keras.Model(inputs, {"y": last(first(inputs))}))
    report = quantize(m, overrides={last.name: "skip"})
    assert [entry.keras_layer for entry in report.skipped] == [last.name] * 2
    m = geutil_model.open(keras.Model(inputs, {"y": first(inputs)}))
    report = quantize(m)
    assert len(report.rewritten) == 1
    assert not report.skipped
    calibrate(m, {"x": x})
    expected = first(x).numpy()
    error = np.abs(m.run(x=x)["y"] - expected).max()
    assert error < 0.02 * np.ptp(expected)
    assert compare_int8(m, to_int8(m), {"x": x}).most <= 1
