"""Runtimes that files ask for, next to the numbers that TFLite's converter writes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.tflite.parts import Buffer
from geutil.tflite.precision import runtime_of
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
