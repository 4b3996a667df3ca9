"""The types that ops of TFLite files compute in, weights by type, and slow kernels.

Kernels are slow on CPUs that are plain loops, where float ones are not: measured by
`python -m benchmarks.quantized.kernels` with LiteRT 2.3 on one thread of an x86 machine
with XNNPACK, each op alone with the data of a middle layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from geutil.tflite.parts import Contents, LiteOp

_FLOATS = ("float", "bfloat")
_QUANTIZED = ("int2", "int4", "int8", "int16", "uint4", "uint8")
_CONVERSIONS = frozenset(("CAST", "DEQUANTIZE", "QUANTIZE"))
_NO_NUMBERS = frozenset(("resource", "string", "variant"))
_WIDE = frozenset(("int32", "int64"))
"""Types of biases, sizes and places, which stand beside weights of any type."""


def is_float(dtype: str) -> bool:
    """Tell whether a type is one of floats."""
    return dtype.startswith(_FLOATS)


def by_count(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts by word, the largest first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def has_floats(op: LiteOp) -> bool:
    """Tell whether an op reads or makes floats; conversions from and to them do."""
    return any(is_float(t.dtype) for t in (*op.reads, *op.outputs))


def precision_of(op: LiteOp) -> str:
    """Return the type that an op computes in, and that of its weights if it is another.

    The type is that of what it computes from and into; a file's names for it are
    "int8", "float32", "int16 with int8 weights", or "float32 with int8 weights
    (hybrid)" where TFLite quantizes the activations while it runs.
    """
    read, made = op.reads, op.outputs
    if op.kind in _CONVERSIONS and read and made:
        return f"{read[0].dtype} to {made[0].dtype}"
    data = [*(t for t in read if not t.stored_bytes), *made]
    types = [t.dtype for t in data]
    # Floats count first, then what is quantized.
    known = [t for t in types if is_float(t)]
    known += [t.dtype for t in data if t.quantization is not None]
    known += [t for t in types if t not in _NO_NUMBERS]
    computing = next(iter((*known, *types)), None)
    constants = [t for t in read if t.stored_bytes and t.dtype not in _WIDE]
    constants = [t for t in constants if is_float(t.dtype) or t.quantization]
    largest = max(constants, key=lambda t: t.stored_bytes, default=None)
    weights = None if largest is None else largest.dtype
    if weights is None or computing is None or weights == computing:
        return computing or "none"
    is_hybrid = is_float(computing) and not is_float(weights)
    return f"{computing} with {weights} weights{' (hybrid)' if is_hybrid else ''}"


def computes_in_float(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of floats."""
    return is_float(precision) and " to " not in precision


def is_quantized(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of quantized numbers."""
    return precision.startswith(_QUANTIZED) and " to " not in precision


def stored_bytes(file: Contents) -> dict[str, int]:
    """Return the bytes of constants by their type, the largest first."""
    totals: dict[str, int] = {}
    # In the order of the file, the first tensor of a buffer tells its type.
    of_buffers = {id(t.buffer): t for t in reversed([*file.tensors])}
    for tensor in of_buffers.values():
        if tensor.stored_bytes:
            dtype, size = tensor.dtype, tensor.stored_bytes
            totals[dtype] = totals.get(dtype, 0) + size
    return by_count(totals)


_INT8, _INT16, _HYBRID = "int8", "int16", "int8 while it runs"
_INT4, _INT4_TO_FLOAT = "int8 with int4 weights", "float32 with int4 weights"
_TIMES: dict[tuple[str, str], int] = {
    (kind, computes_in): int(times)
    for computes_in, row in {
        _INT8: "BATCH_MATMUL 9, RELU 14, RELU6 14, RSQRT 160",
        _INT4: "DEPTHWISE_CONV_2D 14",
        _HYBRID: "DEPTHWISE_CONV_2D 4",
        _INT16: "CONV_2D 40, DEPTHWISE_CONV_2D 30, TRANSPOSE_CONV 20, BATCH_MATMUL 40, "
        "AVERAGE_POOL_2D 13, MAX_POOL_2D 11, MEAN 40, RELU 40, RELU6 15, LOGISTIC 8, "
        "LEAKY_RELU 35, TANH 7, SOFTMAX 11, STRIDED_SLICE 17, RESIZE_BILINEAR 8",
        _INT4_TO_FLOAT: "CONV_2D 6, FULLY_CONNECTED 7",
    }.items()
    for kind, times in map(str.split, row.split(","))
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
    makers = (t.producer for t in op.reads)
    unpacking = (m for m in makers if m is not None and m.kind == "DEQUANTIZE")
    if any(maker.reads[0].dtype == "int4" for maker in unpacking):
        return _INT4_TO_FLOAT
    precision = precision_of(op)
    if precision.endswith("int8 weights (hybrid)"):
        return _HYBRID
    return precision.removesuffix(" with int8 weights")
