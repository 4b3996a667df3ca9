"""The default calibration, against TFLite's own post-training quantization."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_int8
from tests.quantize.converted import both_results, opened, spec
from tests.quantize.small_networks import prepared
from tests.settings import needs_eager

pytestmark = needs_eager

layers = tf.keras.layers
SIZE = (16, 6)


def batches(count, seed=0):
    """Return batches whose values differ in size, as those of photographs do."""
    random = np.random.default_rng(seed)
    drawn = (random.normal(size=(8, *SIZE)) for _ in range(count))
    sizes = random.uniform(0.2, 2.0, count)
    return [np.float32(x * size) for x, size in zip(drawn, sizes, strict=True)]


def network():
    tf.keras.utils.set_random_seed(0)
    x = inputs = layers.Input(SIZE)
    for _ in range(3):
        x = layers.Activation("swish")(layers.Conv1D(12, 3)(x))
    x = layers.Dense(4)(layers.Flatten()(x))
    return tf.keras.Model(inputs, x)


def by_tflite(net, data, folder):
    """Return the file of TFLite's own quantization."""
    m = model.open(net)
    (name,) = m.inputs
    m.save(folder)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ({name: x} for x in data)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8
    return converter.convert()


def noise(m, blob, net, x):
    """Return what the file is off by, as a share of the variance."""
    (name,), (output,) = m.inputs, m.outputs
    _, found = both_results(m, blob, {name: x})[output]
    exact = net(x, training=False).numpy()
    return np.mean((found - exact) ** 2) / exact.var()


def test_the_default_is_as_good_as_what_tflite_does_itself(tmp_path):
    net, data = network(), batches(6)
    m = model.open(net)
    quantize(m, is_training=False)
    (name,) = m.inputs
    report = calibrate(m, [{name: x} for x in data])
    others = np.concatenate(batches(6, seed=1))
    own = noise(m, to_int8(m), net, others)
    assert own <= 1.1 * noise(m, by_tflite(net, data, tmp_path / "net"), net, others)
    assert report.method in report.noise
    calibrate(m, [{name: x} for x in data], "moving_average")
    assert own < noise(m, to_int8(m), net, others)


def outlier(size):
    """Return a network, and batches of values near 1, of which one is large."""
    random = np.random.default_rng(0)
    weights = tf.constant(np.float32(random.normal(size=(50, 8))))

    data = np.float32(random.normal(size=(4, 400, 50)))
    data[0, 0, 0] = size
    m = prepared(opened(lambda a: {"y": tf.matmul(a, weights)}, spec(None, 50)))
    return m, [{"a": x} for x in data]


@pytest.mark.parametrize(("size", "gain"), [(4.0, -0.3), (40.0, 0.8)])
def test_values_are_clipped_where_the_data_says_so(size, gain):
    """By dB that it gains: next to nothing is lost where nothing is far out."""
    m, data = outlier(size)
    report = calibrate(m, data)
    assert report.method == "mse"
    assert list(report.noise) == ["mse", "min_max"]
    assert 10 * np.log10(report.noise["min_max"] / report.noise["mse"]) > gain
    assert "noise / variance: mse" in str(report)
    other = calibrate(m, data, "mse")
    for name, ends in other.ranges.items():
        np.testing.assert_array_equal(report.ranges[name], ends)


def test_batch_norms_that_are_still_there_are_counted():
    random = np.random.default_rng(0)
    kernel = random.normal(size=(3, 3, 3, 4)).astype(np.float32)
    mean, variance, scale, offset = random.uniform(0.5, 1.5, (4, 4)).astype(np.float32)
    moving = [tf.Variable(mean), tf.Variable(variance)]

    def network(x):
        y, *_ = tf.compat.v1.nn.fused_batch_norm(
            tf.nn.conv2d(x, kernel, 1, "SAME"),
            *(scale, offset, moving[0], variance),
            is_training=False,
        )
        z = tf.nn.conv2d(x, -kernel, 1, "SAME")
        z = tf.nn.batch_normalization(z, *moving, offset, scale, 1e-3)
        # What is no norm: a product with a vector, and a layer norm.
        y = tf.nn.relu(y + z) * scale
        spread = tf.math.reduce_variance(y, -1, keepdims=True)
        return {"y": y * tf.math.rsqrt(spread + 1e-3)}

    m, folded = (opened(network, spec(1, 8, 8, 3)) for _ in range(2))
    (warning,) = quantize(m, is_training=False).warnings
    assert warning.startswith("2 batch norm(s) are still there")
    fold_batch_norms(folded)
    assert quantize(folded, is_training=False).warnings == ()
