"""Slow kernels that are reported, and the runtimes that files ask for.

These are compared with the numbers that TFLite's converter writes.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.quantize import calibrate, quantize, to_tflite
from geutil.tflite.kinds import runtime_of
from geutil.tflite.parts import Buffer
from tests.settings import needs_eager
from tests.tflite_files import IMAGE, SAMPLES, converted, network


@pytest.mark.parametrize(
    "name", ["floats", "dynamic_range", "attention", "lstm", "flow", "two_signatures"]
)
def test_the_kernels_of_a_file_ask_for_what_the_converter_wrote(name):
    file = tflite.open(SAMPLES[name]().blob)
    assert runtime_of(file.ops) == file.runtime != ""


def test_files_of_integers_name_the_runtime_that_the_converters_name():
    wanted = converted(
        network(),
        optimizations=[tf.lite.Optimize.DEFAULT],
        representative_dataset=lambda: [[IMAGE]],
        inference_input_type=tf.int8,
        inference_output_type=tf.int8,
    )
    assert tflite.open(SAMPLES["int8"]().blob).runtime == tflite.open(wanted).runtime


def named(file):
    """Return the runtime that a file names once it is written."""
    entry = tflite.open(file.to_bytes()).metadata["min_runtime_version"]
    return entry.data.tobytes().rstrip(b"\0").decode()


def gelu_behind(file):
    (y,) = file.graphs[0].outputs
    file.set_outputs([file.add("GELU", [y], approximate=False)])


def newer_version(file):
    file.find("CONV_2D")[0].version = 8


def other_type(file):
    file.set_io_type(outputs="uint8")


def older_kind(file):
    (y,) = file.graphs[0].outputs
    file.set_outputs([file.add("RELU", [y])])


@pytest.mark.parametrize(
    ("name", "edit", "needed"),
    [
        ("floats", gelu_behind, "2.9.0"),
        ("floats", newer_version, "2.15.0"),
        ("floats", older_kind, None),
        ("int8", other_type, None),
    ],
)
def test_edits_raise_the_runtime_that_a_file_names(name, edit, needed):
    file = tflite.open(SAMPLES[name]().blob)
    before = named(file)
    edit(file)
    assert file.runtime == named(file) == (needed or before)
    assert tuple(map(int, file.runtime.split("."))) >= tuple(
        map(int, runtime_of(file.ops).split("."))
    )
    # A part of the edited file names it, too.
    assert named(file.cut()) == file.runtime


def test_the_number_that_a_converter_wrote_stays_until_a_newer_kernel_comes():
    file = tflite.open(SAMPLES["floats"]().blob)
    for text in ("1.0.0", "of my own", ""):
        entry = np.frombuffer(text.encode().ljust(16, b"\0"), np.uint8)
        file.metadata["min_runtime_version"] = Buffer(entry)
        assert named(tflite.open(file.to_bytes())) == text


def test_kernels_that_no_table_knows_count_for_nothing():
    newer = tflite.LiteOp("GELU", [], [], version=9)
    custom = tflite.LiteOp("TILE", [], [], version=3, custom_options=b"")
    assert runtime_of([newer, custom]) == ""
    assert runtime_of([newer, custom, tflite.LiteOp("TILE", [], [])]) == "1.10.1"


KERNEL = np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32)


def convolutions(x):
    x = tf.nn.relu(tf.nn.conv2d(x, KERNEL, 1, "SAME"))
    x = tf.nn.depthwise_conv2d(x, KERNEL[..., :1], [1, 1, 1, 1], "SAME")
    return {"y": tf.tanh(tf.nn.conv2d(x, KERNEL, 1, "SAME"))}


def file_of(scheme):
    spec = tf.TensorSpec([1, 8, 8, 4], name="x")
    m = model.open(tf.function(convolutions, input_signature=[spec]))
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


@needs_eager
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


@needs_eager
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


@needs_eager
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
