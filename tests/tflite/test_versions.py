"""Runtimes that files ask for, next to the numbers that TFLite's converter writes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from geutil import tflite
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


def test_kernels_that_no_table_knows_count_for_nothing():
    newer = tflite.LiteOp("GELU", [], [], version=9)
    custom = tflite.LiteOp("TILE", [], [], version=3, custom_options=b"")
    assert runtime_of([newer, custom]) == ""
    assert runtime_of([newer, custom, tflite.LiteOp("TILE", [], [])]) == "1.10.1"
