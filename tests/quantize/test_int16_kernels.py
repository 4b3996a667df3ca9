"""The table of kernels with activations of 16 bits, measured with the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import tflite_edits
from geutil.graph.tflite_runtime import unpacked
from geutil.quantize import calibrate, quantize, to_tflite
from geutil.quantize.int8.running import Runner
from geutil.quantize.tflite.int16_kernels import INEXACT, INT16_KERNELS
from tests.quantize.converted import opened, samples, spec
from tests.quantize.test_kernels import FLOAT_CASES, KERNEL_CASES, one
from tests.settings import needs_eager

pytestmark = needs_eager

KERNEL = np.random.default_rng(0).normal(size=(3, 3, 4, 6)).astype(np.float32)
BIAS = np.linspace(-1.0, 1.0, 6).astype(np.float32)
IMAGE, ROWS = spec(2, 8, 8, 4), spec(5, 4)
STRIDES = [1, 1, 1, 1]

LAYER_CASES = {
    "convolution": one(
        lambda a: tf.nn.relu6(tf.nn.bias_add(tf.nn.conv2d(a, KERNEL, 1, "SAME"), BIAS))
    ),
    "without a bias": one(lambda a: tf.nn.conv2d(a, KERNEL, 2, "VALID")),
    "dilated": one(lambda a: tf.nn.conv2d(a, KERNEL, 1, "SAME", dilations=2)),
    "grouped": one(lambda a: tf.nn.conv2d(a, KERNEL[:, :, :2], 1, "SAME")),
    "depthwise": one(lambda a: tf.nn.depthwise_conv2d(a, KERNEL, STRIDES, "SAME")),
    "transposed": one(
        lambda a: tf.nn.conv2d_transpose(
            a, KERNEL.transpose(0, 1, 3, 2), [2, 16, 16, 6], 2
        )
    ),
    "dense": (
        lambda a: tf.nn.bias_add(tf.matmul(a, KERNEL[0, 0]), BIAS),
        (ROWS,),
        {},
    ),
    "dense of batches": (
        lambda a: tf.einsum("abc,cd->abd", a, KERNEL[0, 0]),
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


class File:
    """A function, quantized with activations of 16 bits, in a file."""

    def __init__(self, function, specs, choices):
        self.model = opened(function, *specs)
        quantize(self.model, is_training=False, scheme="int16x8")
        self.data = samples(self.model.inputs, choices.get("low", -3.0))
        calibrate(self.model, self.data, "min_max")
        self.blob = to_tflite(self.model)
        file = unpacked(self.blob)
        (self.graph,) = file.subgraphs
        self.kinds = [tflite_edits.kind_of(file, op) for op in self.graph.operators]

    def floats(self):
        """Return the types of the ops that read or make floats, casts left out."""
        return [
            kind
            for kind, op in zip(self.kinds, self.graph.operators, strict=True)
            if kind not in ("QUANTIZE", "DEQUANTIZE")
            if any(
                tflite_edits.type_of(self.graph.tensors[i]) == "FLOAT32"
                for i in (*op.inputs, *op.outputs)
                if i >= 0
            )
        ]

    def most(self):
        """Return how many steps the file is off the model at most."""
        runner = Runner(self.blob, list(self.model.inputs), list(self.model.outputs))
        stored = runner.stored(self.data)
        found = runner.run(stored)
        expected = self.model.run(**runner.values(stored))
        if not isinstance(expected, dict):
            expected = {next(iter(self.model.outputs)): expected}
        apart = [0.0]
        for name, value in expected.items():
            step, _ = runner.quantization(name)
            if found[name].dtype == np.int16:
                levels = np.clip(np.round(np.asarray(value) / step), -32767, 32767)
                apart.append(float(np.abs(levels - found[name]).max()))
            else:
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-3)
        return max(apart)


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_with_16_bits(case):
    file = File(*CASES[case])
    assert set(file.floats()) == ({FLOATS[case]} if case in FLOATS else set())
    assert file.most() <= max((STEPS.get(kind, 1) for kind in file.kinds), default=1)


@pytest.mark.parametrize("case", FLOAT_CASES)
def test_what_has_no_kernel_is_between_casts(case, caplog):
    file = File(*FLOAT_CASES[case])
    assert file.floats()
    assert not set(file.floats()) & set(INT16_KERNELS) - {"ADD", "ABS"}
    assert file.most() <= 1
    for kind in file.floats():
        assert f"to_tflite: {kind} " in caplog.text


def test_every_kernel_of_the_table_is_measured():
    met = {kind for case in CASES for kind in File(*CASES[case]).kinds}
    met |= {"GELU", "SQUEEZE", "EXPAND_DIMS"}
    assert set(INT16_KERNELS) - {"SELECT_V2"} <= met
    assert met >= INEXACT


@pytest.mark.parametrize("approximate", [False, True])
def test_gelus_are_in_float(approximate):
    file = File(*one(lambda a: tf.nn.gelu(a, approximate=approximate)))
    assert file.floats() == ["GELU"]
    assert file.most() <= 1


def test_inputs_and_outputs_are_integers_of_16_bits():
    file = File(*LAYER_CASES["dense"])
    runner = Runner(file.blob, list(file.model.inputs), list(file.model.outputs))
    (name,) = file.model.inputs
    assert runner.stored(file.data)[name].dtype == np.int16
    assert file.kinds == ["FULLY_CONNECTED"]
    types = [tflite_edits.type_of(t) for t in file.graph.tensors]
    assert sorted(types) == ["INT16", "INT16", "INT64", "INT8"]
