"""Tests of files turned back into floats, against the arithmetic of their numbers."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from tests.tflite.running import drawn, float_file, quantized, run
from tests.tflite_files import SAMPLES

RANDOM = np.random.default_rng(6)
KERNEL = RANDOM.normal(size=(3, 3, 4, 8)).astype(np.float32)
DEPTHS = RANDOM.normal(size=(3, 3, 8, 1)).astype(np.float32)
DENSE = RANDOM.normal(size=(8, 5)).astype(np.float32)
BIAS = RANDOM.normal(size=8).astype(np.float32)
IMAGE = tf.TensorSpec([1, 6, 6, 4], name="x")


def network(x, kernel, depths, dense, bias):
    x = tf.nn.relu6(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 2, "SAME"), bias))
    y = tf.nn.depthwise_conv2d(x, depths, (1, 1, 1, 1), "SAME")
    y = tf.pad(tf.concat([x, y], 1), [[0, 0], [1, 0], [0, 0], [0, 0]])
    y = tf.reshape(tf.nn.max_pool2d(y, 2, 1, "VALID"), [-1, 8])
    return tf.nn.softmax(y @ dense) + tf.tanh(y)[:, :5]


def body(x):
    return network(x, KERNEL, DEPTHS, DENSE, BIAS)


@functools.cache
def integers(ends="int8"):
    return quantized(body, IMAGE, 1.0, tf.as_dtype(ends))


def of_kind(file, kind):
    return [op for op in file.graphs[0].ops if op.kind == kind]


@pytest.mark.parametrize("ends", ["int8", "float32"])
def test_integers_become_the_float_network_of_their_numbers(ends):
    """TensorFlow computes the same with the numbers that the weights stand for."""
    file = tflite.open(integers(ends))
    kinds = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
    conv, depthwise, dense = (of_kind(file, kind)[0].inputs for kind in kinds)
    numbers = {t: file.constants[t.name] for t in (conv[1], conv[2], depthwise[1])}
    kernel = numbers[conv[1]].transpose(1, 2, 3, 0)
    depths = numbers[depthwise[1]].reshape(3, 3, 8, 1)
    matrix = file.constants[dense[1].name].T
    report = file.dequantize()
    assert {t.dtype for t in report.tensors} == {"float32"}
    kept = {t.dtype for t in file.graphs[0].tensors if t.quantization}
    assert kept == set()
    assert not of_kind(file, "QUANTIZE") + of_kind(file, "DEQUANTIZE")
    x = np.random.default_rng(7).uniform(-1, 1, (1, 6, 6, 4)).astype(np.float32)
    wanted = network(x, kernel, depths, matrix, numbers[conv[2]])
    (made,) = run(tflite.open(file.to_bytes()).to_bytes(), x)
    np.testing.assert_allclose(made, wanted, rtol=1e-6, atol=1e-6)


def test_versions_and_options_are_those_of_float_kernels():
    file, wanted = tflite.open(integers()), tflite.open(float_file(body, IMAGE))
    file.dequantize()
    made = {op.kind: op.version for op in file.ops}
    assert made.items() <= {op.kind: op.version for op in wanted.ops}.items()
    activations = [op.options.get("fused_activation_function") for op in file.ops]
    assert "RELU6" in activations


@pytest.mark.parametrize("optimization", ["float16", "dynamic"])
def test_small_weights_become_float32(optimization):
    """Weights of float16 and of hybrid kernels are the numbers that they stand for."""
    wide = np.random.default_rng(7).normal(size=(64, 64)).astype(np.float32)

    def product(x):
        return tf.nn.relu(x @ wide)

    traced = tf.function(product).get_concrete_function(
        tf.TensorSpec([2, 64], name="x")
    )
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if optimization == "float16":
        converter.target_spec.supported_types = [tf.float16]
    file = tflite.open(converter.convert())
    weights = next(t for t in file.graphs[0].tensors if t.sizes == (64, 64))
    numbers = file.constants[weights.name]
    assert weights.dtype in ("float16", "int8")
    file.dequantize()
    assert [op.kind for op in file.graphs[0].ops] == ["FULLY_CONNECTED"]
    x = np.random.default_rng(7).normal(size=(2, 64)).astype(np.float32)
    (made,) = run(file.to_bytes(), x)
    np.testing.assert_allclose(made, np.maximum(x @ numbers.T, 0), 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["int8", "mixed", "dynamic_range", "flow"])
def test_samples_stay_near_their_integers(name):
    """Float results lie within the noise of eight bits of those of the integers."""
    blob = SAMPLES[name]().blob
    file = tflite.open(blob)
    (old, *_), (result, *_) = file.graphs[0].inputs, file.graphs[0].outputs
    steps, of_result = old.quantization, result.quantization
    file.dequantize()
    if name == "flow":
        assert file.to_bytes() == tflite.open(blob).to_bytes()
        return
    (x,) = drawn(blob)
    wanted = run(blob, x)[0]
    if steps is not None:
        x = ((x.astype(int) - steps.zero_points[0]) * steps.scales[0]).astype("float32")
    made = run(file.to_bytes(), x)[0]
    if of_result is not None:
        wanted = (wanted.astype(int) - of_result.zero_points[0]) * of_result.scales[0]
    assert np.abs(made - wanted).max() <= 0.06 * max(np.ptp(wanted), 0.2)


def test_variables_and_their_first_values_become_float():
    class Streaming(tf.Module):
        def __init__(self):
            super().__init__()
            self.state = tf.Variable(tf.zeros([1, 2, 4]))

        @tf.function(input_signature=[tf.TensorSpec([1, 2, 4], name="x")])
        def __call__(self, x):
            both = tf.concat([self.state, x], 1)
            self.state.assign(both[:, 2:])
            return tf.nn.relu(both)

    module = Streaming()
    traced = module.__call__.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced], module)
    converter.experimental_enable_resource_variables = True
    wanted = tflite.open(converter.convert())
    steps = tflite.Quantization((1 / 64,), (5,))
    file = tflite.open(wanted.to_bytes())
    for tensor in file.tensors:
        if tensor.dtype == "float32":
            value = tensor.value
            tensor.dtype, tensor.quantization = "int8", steps
            if value is not None:
                tensor.value = np.full(value.shape, 5, np.int8)
    file.dequantize()
    assert [t.dtype for t in file.tensors] == [t.dtype for t in wanted.tensors]
    (x,) = drawn(wanted.to_bytes())
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(wanted.to_bytes(), x)[0]
    )


def test_a_change_of_steps_that_cuts_at_zero_becomes_a_relu():
    steps = tflite.Quantization((0.5,), (0,)), tflite.Quantization((0.25,), (-128,))
    file = tflite.LiteFile()
    x = file.add_input("x", "int8", [4], quantization=steps[0])
    y = file.add("QUANTIZE", [x], name="y", dtype="int8", quantization=steps[1])
    file.set_outputs([y])
    file.dequantize()
    assert [op.kind for op in file.ops] == ["RELU"]
    (made,) = run(file.to_bytes(), np.array([-2, -0.5, 0, 3], np.float32))
    assert made.tolist() == [0, 0, 0, 3]


def test_custom_ops_of_integers_are_refused():
    file = tflite.open(integers())
    graph = file.graphs[0]
    (old,) = graph.outputs
    new = graph.add_tensor(old.copied())
    graph.add_op(tflite.LiteOp("Mine", [old], [new], custom_options=b""))
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=r"Mine .* cut the file around it"):
        file.dequantize()
    assert file.to_bytes() == before
