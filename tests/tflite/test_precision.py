"""What is told of slow kernels, and whether all that is told can be."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.quantize import calibrate, quantize, to_tflite
from tests.settings import needs_eager

pytestmark = needs_eager

KERNEL = np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32)


def network(x):
    x = tf.nn.relu(tf.nn.conv2d(x, KERNEL, 1, "SAME"))
    x = tf.nn.depthwise_conv2d(x, KERNEL[..., :1], [1, 1, 1, 1], "SAME")
    return {"y": tf.tanh(tf.nn.conv2d(x, KERNEL, 1, "SAME"))}


def file_of(scheme):
    spec = tf.TensorSpec([1, 8, 8, 4], name="x")
    m = model.open(tf.function(network, input_signature=[spec]))
    if scheme in ("int8", "int8x4", "int16x8"):
        quantize(m, scheme=scheme, is_training=False)
        sample = np.random.default_rng(1).normal(size=(1, 8, 8, 4))
        calibrate(m, [{"x": sample.astype(np.float32)}], "min_max", progress=False)
    return to_tflite(m, scheme=scheme)


SLOW = {
    "int8": {},
    "int8x4": {},
    "int16x8": {"CONV_2D": 2, "DEPTHWISE_CONV_2D": 1, "TANH": 1},
    "dynamic_range": {},
    "weight_only_int8": {},
    "weight_only_int4": {"CONV_2D": 2},
    "float16": {},
}


@pytest.mark.parametrize("scheme", SLOW)
def test_slow_ops_are_told_by_scheme(scheme, caplog, tmp_path):
    told = slow_ops(tflite.open(file_of(scheme)), tmp_path)
    assert {slow.kind: slow.count for slow in told} == SLOW[scheme]
    assert [slow.times for slow in told] == sorted(
        (slow.times for slow in told), reverse=True
    )
    for slow in told:
        assert f"to_tflite: slow on CPUs: {slow}" in caplog.text
    assert ("slow on CPUs" in caplog.text) is bool(told)


def slow_ops(file, folder):
    return model.inspect(file.save(folder / "m.tflite", overwrite=True)).slow_ops


def test_depthwise_weights_in_4_bits_and_rounded_data_are_slow(tmp_path):
    """No file of geutil's has them."""
    file = tflite.open(file_of("int8x4"))
    (depthwise,) = (op for op in file.ops if op.kind == "DEPTHWISE_CONV_2D")
    weights = depthwise.inputs[1]
    weights.store(weights.value // 16, "int4")
    (slow,) = slow_ops(file, tmp_path)
    assert (slow.kind, slow.count) == ("DEPTHWISE_CONV_2D", 1)
    assert slow.computes_in == "int8 with int4 weights"
    assert str(slow).startswith("1 DEPTHWISE_CONV_2D in int8 with int4 weights, about")


PLAIN_LOOPS = {
    "int8": "BATCH_MATMUL RELU RELU6 RSQRT",
    "int16": """
        AVERAGE_POOL_2D BATCH_MATMUL CONV_2D DEPTHWISE_CONV_2D LEAKY_RELU LOGISTIC
        MAX_POOL_2D MEAN RELU RELU6 RESIZE_BILINEAR SOFTMAX STRIDED_SLICE TANH
        TRANSPOSE_CONV
    """,
}


@pytest.mark.parametrize("dtype", PLAIN_LOOPS)
def test_every_kind_with_a_slow_kernel_is_told(dtype, tmp_path):
    file = tflite.LiteFile()
    steps = tflite.Quantization((0.5,))
    x = file.add_input("x", dtype, [1, 4, 4, 4], quantization=steps)
    kinds = PLAIN_LOOPS[dtype].split()
    for kind in (*kinds, "ADD", "RESHAPE"):
        made = tflite.LiteTensor(kind, dtype, [1, 4, 4, 4], steps)
        options = {"LEAKY_RELU": {"alpha": 0.5}, "SOFTMAX": {"beta": 1.0}}.get(kind, {})
        file.add(kind, [x], outputs=[made], **options)
    file.set_outputs([x])
    told = slow_ops(file, tmp_path)
    assert {slow.kind: slow.count for slow in told} == dict.fromkeys(kinds, 1)
    assert min(slow.times for slow in told) >= 4
