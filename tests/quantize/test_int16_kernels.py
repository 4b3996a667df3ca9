"""The table of kernels with activations of 16 bits, measured with the interpreter."""

import functools
import re

import numpy as np
import tensorflow as tf

from geutil.tflite.kinds import INEXACT, KINDS
from tests.interpreter import has_floats
from tests.quantize.converted import Together, spec, types_of
from tests.quantize.test_kernels import FLOAT_CASES, KERNEL_CASES, one
from tests.settings import needs_eager

pytestmark = needs_eager

# Each layer has weights of its own.
KERNEL = np.random.default_rng(0).normal(size=(3, 3, 4, 6)).astype(np.float32)
BIAS = np.linspace(-1.0, 1.0, 6).astype(np.float32)
IMAGE, ROWS = spec(2, 8, 8, 4), spec(5, 4)
STRIDES = [1, 1, 1, 1]

LAYER_CASES = {
    "convolution": one(
        lambda a: tf.nn.relu6(tf.nn.bias_add(tf.nn.conv2d(a, KERNEL, 1, "SAME"), BIAS))
    ),
    "without a bias": one(lambda a: tf.nn.conv2d(a, KERNEL[::-1], 2, "VALID")),
    "dilated": one(lambda a: tf.nn.conv2d(a, KERNEL[:, ::-1], 1, "SAME", dilations=2)),
    "grouped": one(lambda a: tf.nn.conv2d(a, KERNEL[:, :, :2], 1, "SAME")),
    "depthwise": one(lambda a: tf.nn.depthwise_conv2d(a, KERNEL, STRIDES, "SAME")),
    "transposed": one(
        lambda a: tf.nn.conv2d_transpose(
            a, KERNEL.transpose(0, 1, 3, 2), [2, 16, 16, 6], 2
        )
    ),
    "dense": (lambda a: tf.nn.bias_add(tf.matmul(a, KERNEL[0, 0]), BIAS), (ROWS,), {}),
    "dense of batches": (
        lambda a: tf.einsum("abc,cd->abd", a, KERNEL[2, 2]),
        (spec(2, 5, 4),),
        {},
    ),
    "matrices of batches": (
        lambda a: tf.matmul(a, np.stack([KERNEL[0, 0], KERNEL[1, 1]])),
        (spec(2, 5, 4),),
        {},
    ),
    "constant factor": one(lambda a: a * BIAS[:4]),
    "Roll": KERNEL_CASES["Roll"],
    "a reshaped input": one(lambda a: tf.exp(tf.reshape(a, [2, -1])) * 0.5),
}
INT16_KERNELS = {k for k, one in KINDS.items() if "int16" in one.widths}
FLOATS = {
    "DepthToSpace": "DEPTH_TO_SPACE",
    "Exp": "EXP",
    "Identity": "EXP",
    "Log": "LOG",
    "LogSoftmax": "LOG_SOFTMAX",
    "MatMul": "FULLY_CONNECTED",
    "PadV2": "PADV2",
    "Rsqrt": "RSQRT",
    "Select": "GREATER",
    "SelectV2": "GREATER",
    "SpaceToDepth": "SPACE_TO_DEPTH",
    "SquaredDifference": "SQUARED_DIFFERENCE",
    "a reshaped input": "EXP",
}
"""Cases that are not all integers, and the op of the file that is in float."""
STEPS = {"SOFTMAX": 2, "TANH": 2}
"""How many steps kernels are off that are not within one."""
CASES = {**KERNEL_CASES, **LAYER_CASES}


@functools.cache
def file():
    """Return the file of all cases: each with activations of 16 bits."""
    return Together(CASES, scheme="int16x8")


def floats(ops):
    """Return the types of the ops that compute in float, casts left out."""
    casts = ("QUANTIZE", "DEQUANTIZE")
    return {op.kind for op in ops if has_floats(op) and op.kind not in casts}


def test_kernels_compute_with_16_bits():
    wrong = {}
    for case, part in file().parts().items():
        apart, ops = part.most, file().ops(case)
        most = max((STEPS.get(op.kind, 1) for op in ops), default=1)
        expected = {FLOATS[case]} if case in FLOATS else set()
        if floats(ops) != expected or apart > most:
            wrong[case] = floats(ops), apart
    assert wrong == {}


def test_comparisons_are_of_the_values_themselves():
    """In float there are no steps that they would have to be scaled to."""
    cases = {
        "data": (tf.greater, (ROWS, ROWS)),
        "number": one(lambda a: a < 0.3),
    }
    made = Together(cases, scheme="int16x8")
    kinds = {case: made.parts()[case].kinds for case in cases}
    assert [sorted(each) for each in kinds.values()] == [
        ["DEQUANTIZE", "DEQUANTIZE", "GREATER"],
        ["DEQUANTIZE", "LESS"],
    ]


def test_what_has_no_kernel_is_between_casts(caplog):
    gelus = {
        "erf": one(tf.nn.gelu),
        "tanh": one(lambda a: tf.nn.gelu(a, approximate=True)),
    }
    integers = {
        "rows": (
            lambda a: tf.reshape(tf.cos(a), [tf.shape(a)[0], -1]),
            (spec(None, 8, 8, 4),),
            {},
        )
    }
    cases = {**FLOAT_CASES, **gelus, **integers}
    made, wrong, met = Together(cases, scheme="int16x8"), {}, set()
    for case, part in made.parts().items():
        apart = part.most
        # SHAPE reads no values.
        kinds = floats(made.ops(case)) - {"SHAPE"}
        met |= kinds
        told = all(f"to_tflite: {kind} " in caplog.text for kind in kinds)
        others = kinds & INT16_KERNELS - {"ADD", "ABS"}
        if case in gelus:
            others = kinds ^ {"GELU"}
        if not kinds or others or not told or apart > 1:
            wrong[case] = kinds, apart
    assert wrong == {}
    # Of ops on integers there is nothing to tell.
    assert set(re.findall("to_tflite: ([A-Z_0-9]+) ", caplog.text)) <= met


def test_every_kernel_of_the_table_is_measured():
    met = {op.kind for case in CASES for op in file().ops(case)}
    met |= {"GELU", "SQUEEZE", "EXPAND_DIMS"}
    # They hold no values, or those of one number.
    met |= {"FILL", "RANK", "SHAPE"}
    assert INT16_KERNELS - {"SELECT_V2"} <= met
    assert met >= INEXACT
    # Inputs and outputs are integers of 16 bits.
    (op,) = file().ops("dense")
    assert op.kind == "FULLY_CONNECTED"
    assert types_of(op) == ("int16", "int8", "int64", "int16")
