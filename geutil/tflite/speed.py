"""Kernels of TFLite that are slow on CPUs: plain loops, where float ones are not.

Measured by `python -m benchmarks.quantized.kernels` with LiteRT 2.3 on one thread of an
x86 machine with XNNPACK, each op alone with the data of a middle layer. Accelerators,
and microcontrollers, have kernels of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from geutil.tflite.parts import Contents, LiteOp, LiteTensor
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
    """Ops of one type of a file that run on slow kernels."""

    kind: str
    computes_in: str
    count: int
    times: int

    def __str__(self) -> str:
        return (
            f"{self.count} {self.kind} in {self.computes_in}, about {self.times} times "
            "the time of float"
        )


def slow_ops(file: Contents) -> tuple[SlowOps, ...]:
    """Return the ops of a file that run on slow kernels on CPUs."""
    counts = Counter((op.kind, _computes_in(op)) for op in file.ops)
    found = [
        SlowOps(*key, count, _TIMES[key])
        for key, count in counts.items()
        if key in _TIMES
    ]
    return tuple(sorted(found, key=lambda slow: (-slow.times, slow.kind)))


def _computes_in(op: LiteOp) -> str:
    if any(map(_is_unpacked, op.reads)):
        return _INT4_TO_FLOAT
    precision = precision_of(op)
    if precision.endswith("int8 weights (hybrid)"):
        return _HYBRID
    return precision.removesuffix(" with int8 weights")


def _is_unpacked(tensor: LiteTensor) -> bool:
    """Tell whether a tensor is made floats of 4 bits as the file runs."""
    maker = tensor.producer
    if maker is None or maker.kind != "DEQUANTIZE":
        return False
    return maker.reads[0].dtype == "int4"
