"""Kernels of TFLite that are slow on CPUs: plain loops, where float ones are not.

Measured by `python -m benchmarks.quantized.kernels` with LiteRT 2.3 on one thread of an
x86 machine with XNNPACK, each op alone with the data of a middle layer. Accelerators,
and microcontrollers, have kernels of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from geutil.tflite.old_reading import LiteFile, LiteGraph, LiteOp
from geutil.tflite.precision import precision_of

_INT8, _INT16, _HYBRID = "int8", "int16", "int8 while it runs"
_INT4, _INT4_TO_FLOAT = "int8 with int4 weights", "float32 with int4 weights"
_TIMES: dict[tuple[str, str], int] = {
    ("BATCH_MATMUL", _INT8): 9,
    ("RELU", _INT8): 14,
    ("RELU6", _INT8): 14,
    ("RSQRT", _INT8): 160,
    ("DEPTHWISE_CONV_2D", _INT4): 14,
    ("DEPTHWISE_CONV_2D", _HYBRID): 4,
    ("CONV_2D", _INT16): 40,
    ("DEPTHWISE_CONV_2D", _INT16): 30,
    ("TRANSPOSE_CONV", _INT16): 20,
    ("BATCH_MATMUL", _INT16): 40,
    ("AVERAGE_POOL_2D", _INT16): 13,
    ("MAX_POOL_2D", _INT16): 11,
    ("MEAN", _INT16): 40,
    ("RELU", _INT16): 40,
    ("RELU6", _INT16): 15,
    ("LEAKY_RELU", _INT16): 35,
    ("LOGISTIC", _INT16): 8,
    ("TANH", _INT16): 7,
    ("SOFTMAX", _INT16): 11,
    ("STRIDED_SLICE", _INT16): 17,
    ("RESIZE_BILINEAR", _INT16): 8,
    ("CONV_2D", _INT4_TO_FLOAT): 6,
    ("FULLY_CONNECTED", _INT4_TO_FLOAT): 7,
}
"""By type of op and what it computes in, how often the time of float goes into its."""


@dataclass(frozen=True)
class SlowOps:
    """Ops of one type of a file that run on slow kernels.

    Attributes:
        kind: their type, such as "CONV_2D".
        computes_in: what they compute in, such as "int16".
        count: how many they are.
        times: about how many times as long as in float they take, on an x86 CPU.
    """

    kind: str
    computes_in: str
    count: int
    times: int

    def __str__(self) -> str:
        return (
            f"{self.count} {self.kind} in {self.computes_in}, about {self.times} times "
            "the time of float"
        )


def slow_ops(file: LiteFile) -> tuple[SlowOps, ...]:
    """Return the ops of a file that run on slow kernels on CPUs.

    Args:
        file: the file.

    Returns:
        Those of a type together, the slowest type first.

    Cost: linear in ops.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.tflite import old_reading as tflite_reading
        >>> from geutil.tflite.speed import slow_ops
        >>> spec = tf.TensorSpec([1, 8], name="x")
        >>> f = tf.function(lambda x: {"y": tf.exp(x)}, input_signature=[spec])
        >>> convert = tf.lite.TFLiteConverter.from_concrete_functions
        >>> blob = convert([f.get_concrete_function()], f).convert()
        >>> slow_ops(tflite_reading.read(blob))
        ()
    """
    counts: Counter[tuple[str, str]] = Counter()
    for graph in file.graphs:
        unpacked = _unpacked(graph)
        counts.update((op.type, _computes_in(op, graph, unpacked)) for op in graph.ops)
    found = [
        SlowOps(*key, count, _TIMES[key])
        for key, count in counts.items()
        if key in _TIMES
    ]
    return tuple(sorted(found, key=lambda slow: (-slow.times, slow.kind)))


def _unpacked(graph: LiteGraph) -> set[int]:
    """Return the tensors that are made floats of 4 bits as the file runs."""
    return {
        op.outputs[0]
        for op in graph.ops
        if op.type == "DEQUANTIZE" and graph.tensors[op.inputs[0]].dtype == "int4"
    }


def _computes_in(op: LiteOp, graph: LiteGraph, unpacked: set[int]) -> str:
    precision = precision_of(op, graph)
    if any(i in unpacked for i in op.inputs):
        return _INT4_TO_FLOAT
    if precision.endswith("int8 weights (hybrid)"):
        return _HYBRID
    return precision.removesuffix(" with int8 weights")
