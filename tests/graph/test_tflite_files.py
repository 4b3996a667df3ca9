"""What is read from TFLite files, against the interpreter's own account."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph.tflite_files import ops_of
from tests.settings import needs_eager

pytestmark = needs_eager

WEIGHTS = np.ones((3, 3, 3, 4), np.float32)


def converted(function, *shapes, **options):
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    concrete = tf.function(function, input_signature=specs).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], tf.Module())
    for name, value in options.items():
        setattr(converter, name, value)
    return converter.convert()


def convolved(x):
    return tf.nn.softmax(tf.nn.relu(tf.nn.conv2d(x, WEIGHTS, 1, "SAME")))


def quantized(x):
    def fake(t, low, high):
        return tf.quantization.fake_quant_with_min_max_args(t, low, high)

    return fake(tf.nn.relu(fake(x, -3.0, 3.0)), 0.0, 3.0)


def test_float_ops():
    found = ops_of(converted(convolved, [1, 8, 8, 3]))
    assert [op.kind for op in found] == ["CONV_2D", "SOFTMAX"]
    assert found[0].types == ("FLOAT32",) * 4
    assert not any(found[0].steps)
    assert all(op.is_float for op in found)
    assert all(op.result for op in found)


def test_int8_ops():
    (op,) = ops_of(
        converted(
            quantized,
            [2, 3],
            optimizations=[tf.lite.Optimize.DEFAULT],
            inference_input_type=tf.int8,
            inference_output_type=tf.int8,
        )
    )
    assert (op.kind, op.types, op.is_float) == ("RELU", ("INT8", "INT8"), False)
    assert op.steps == pytest.approx((6 / 255, 3 / 255))


def test_ops_of_all_subgraphs():
    def loop(x):
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 9, lambda x: [tf.exp(x)], [x])

    kinds = [op.kind for op in ops_of(converted(loop, [3]))]
    assert {"WHILE", "LESS", "EXP"} <= set(kinds)


def test_ops_of_tensorflow_are_called_by_their_names():
    spec = tf.lite.TargetSpec(
        supported_ops=[tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS]
    )
    blob = converted(tf.linalg.inv, [3, 3], target_spec=spec)
    assert [op.kind for op in ops_of(blob)] == ["FlexMatrixInverse"]


@pytest.mark.parametrize("blob", [b"", b"TFL3", b"some other file altogether"])
def test_other_bytes_are_refused(blob):
    with pytest.raises(ValueError, match="no TFLite file"):
        ops_of(blob)
