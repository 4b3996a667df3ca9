"""Small functions, quantized, calibrated and converted: what TFLite makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.graph.tflite_runtime import new_interpreter
from geutil.quantize import calibrate, compare_int8, quantize, to_int8


@dataclass
class Converted:
    """A function in both forms.

    Attributes:
        model: the quantized model.
        report: what quantization says of it.
        kinds: the types of the ops in the TFLite file.
        floats: of those of them that compute in float.
        most: how many steps the results are apart at most.
        shares: of each output, the share of values that are at most one step apart.
    """

    model: Any
    report: Any
    kinds: list[str]
    floats: list[str]
    most: int
    shares: list[float]

    def types(self):
        """Return the types of the quantized ops, by whether they are told apart."""
        return [entry.op_type for entry in self.report.quantized]

    def fake_quants(self):
        return [op for op in self.model.graph.get_operations() if is_simulated(op)]


def is_simulated(op):
    return op.type.startswith("FakeQuant")


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


def samples(inputs, low=-3.0, high=3.0, seed=0):
    """Return one value at random for each input of a model."""
    random = np.random.default_rng(seed)
    found = {}
    for name, tensor in inputs.items():
        shape = [2 if size is None else size for size in tensor.shape.as_list()]
        if tensor.dtype.is_floating:
            found[name] = random.uniform(low, high, shape).astype(np.float32)
        else:
            found[name] = random.integers(0, 5, shape, tensor.dtype.as_numpy_dtype)
    return found


def opened(function, *specs):
    """Return a function as a model, with inputs a, b and so on."""
    named = [
        tf.TensorSpec(s.shape, s.dtype, name)
        for s, name in zip(specs, "abcdef", strict=False)
    ]
    traced = tf.function(function, input_signature=named, autograph=False)
    return model.open(traced)


def converted(function, *specs, low=-3.0, high=3.0, data=None, **choices):
    """Quantize, calibrate and convert a function; check the graph on the way."""
    m = opened(function, *specs)
    report = quantize(m, is_training=False, **choices)
    ge.verify(m.graph)
    data = data or samples(m.inputs, low, high)
    calibrate(m, data, "min_max")
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)
    floats = [line.partition(" ")[0] for line in comparison.float_ops]
    shares = [output.share(1) for output in comparison.outputs]
    return Converted(m, report, kinds(blob), floats, comparison.most, shares)


def kinds(blob):
    """Return the types of the ops in a TFLite file, in order."""
    return [op["op_name"] for op in new_interpreter(blob)._get_ops_details()]
