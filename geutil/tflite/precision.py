"""The types that ops of TFLite files compute in; the versions of kernels, slow kernels.

Kernels are slow on CPUs that are plain loops, where float ones are not: measured by
`python -m benchmarks.quantized.kernels` with LiteRT 2.3 on one thread of an x86 machine
with XNNPACK, each op alone with the data of a middle layer.

The table of versions holds the kinds that edits make, or change the types of; it is
that of TensorFlow's `lite/tools/versioning/op_version.cc`, which the converter writes
by. The releases are those of `runtime_version.cc` (2.23) beside it; converters write
the newest of a file's kernels into its metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from geutil.tflite.kinds import KINDS, OTHER
from geutil.tflite.parts import Buffer, Contents, LiteOp, LiteTensor

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


_INT8 = """
    ARG_MAX ARG_MIN DEPTH_TO_SPACE EXP GELU GREATER LESS_EQUAL LOG LOG_SOFTMAX
    L2_NORMALIZATION NOT_EQUAL SPACE_TO_DEPTH SPLIT_V SQUARED_DIFFERENCE SUM
    STRIDED_SLICE TRANSPOSE_CONV
"""
_INT16_LATER = """
    ABS ADD AVERAGE_POOL_2D BATCH_MATMUL CONCATENATION GREATER_EQUAL LESS LOGISTIC
    MAX_POOL_2D MEAN MIRROR_PAD PACK PAD PADV2 REDUCE_MAX REDUCE_MIN RELU RELU6 SOFTMAX
    TANH TOPK_V2
"""
_BOOL_BETWEEN = """
    BATCH_TO_SPACE_ND EQUAL GATHER MAXIMUM MINIMUM MUL RESIZE_BILINEAR
    RESIZE_NEAREST_NEIGHBOR SLICE SPACE_TO_BATCH_ND SPLIT
"""
_ROWS: tuple[tuple[str, Mapping[str, int]], ...] = (
    (_INT8, {"int8": 2}),
    (_INT16_LATER, {"int8": 2, "int16": 3}),
    (_BOOL_BETWEEN, {"int8": 2, "int16": 4}),
    ("REVERSE_V2 TILE", {"int8": 3}),
    ("BROADCAST_TO", {"int8": 3, "int16": 3}),
    ("CONV_2D", {"int8": 3, "int16": 4}),
    ("DEPTHWISE_CONV_2D", {"int8": 3, "int16": 5}),
    ("DEQUANTIZE", {"float16": 3, "int4": 6, "int8": 2, "int16": 3}),
    ("FILL", {"int8": 3, "int16": 3}),
    ("FULLY_CONNECTED", {"int8": 4, "int16": 7}),
    ("GATHER_ND", {"int16": 3}),
    ("LEAKY_RELU", {"int16": 2}),
    ("SUB TRANSPOSE", {"int8": 2, "int16": 5}),
    ("UNPACK", {"int8": 2, "int16": 4, "uint8": 2}),
)
_BY_TYPE = {kind: versions for kinds, versions in _ROWS for kind in kinds.split()}
"""Versions by the type of an op's data, where it is not 1."""
_FLAT = 4
"""The first kernels took tensors of up to so many dimensions."""


def _rank(op: LiteOp) -> int:
    return max(len(t.shape or ()) for t in op.inputs if t is not None)


def _has_scales(tensor: LiteTensor | None) -> bool:
    """Tell whether a tensor has several scales."""
    steps = None if tensor is None else tensor.quantization
    return steps is not None and len(steps.scales) > 1


def _of_quantize(op: LiteOp) -> int:
    source, made = op.inputs[0], op.outputs[0]
    types = {made.dtype, "" if source is None else source.dtype}
    if "int4" in types:
        return 4
    if _has_scales(made):
        return 3
    return 2 if made.dtype == "int16" else 1


def _of_transpose_conv(op: LiteOp) -> int:
    if op.options.get("fused_activation_function", "NONE") != "NONE":
        return 4
    return 3 if op.inputs[3:] and op.inputs[3] is not None else 1


def _of_strided_slice(op: LiteOp) -> int:
    if op.options.get("offset"):
        return 8
    if op.options.get("ellipsis_mask") or op.options.get("new_axis_mask"):
        return 6
    return 4 if _rank(op) > _FLAT else 1


def _above(rank: int, version: int) -> Callable[[LiteOp], int]:
    return lambda op: version if _rank(op) > rank else 1


def _with(version: int, *options: str) -> Callable[[LiteOp], int]:
    return lambda op: version if any(op.options.get(o) for o in options) else 1


_BY_OPTION: Mapping[str, Callable[[LiteOp], int]] = {
    "BROADCAST_TO": lambda op: 2,
    "BATCH_TO_SPACE_ND": lambda op: 3 if _rank(op) != _FLAT else 1,
    # Convolutions by groups.
    "CONV_2D": lambda op: (
        6 if len({(t.shape or ())[-1] for t in op.reads[:2]}) > 1 else 1
    ),
    "DEPTHWISE_CONV_2D": lambda op: (
        2 if max(op.options.get(f"dilation_{c}_factor", 1) for c in "hw") > 1 else 1
    ),
    "DEQUANTIZE": lambda op: 5 if _has_scales(op.inputs[0]) else 1,
    "DIV": _above(_FLAT, 2),
    # Without a bias, or with all dimensions.
    "FULLY_CONNECTED": lambda op: (
        6 if len(op.inputs) == 2 else 5 if op.options.get("keep_num_dims") else 1
    ),
    "GATHER": _with(5, "batch_dims"),
    "MAXIMUM": _above(_FLAT, 3),
    "MINIMUM": _above(_FLAT, 3),
    "PAD": _above(_FLAT, 4),
    "PADV2": _above(_FLAT, 4),
    "QUANTIZE": _of_quantize,
    "RESIZE_BILINEAR": _with(3, "half_pixel_centers"),
    "RESIZE_NEAREST_NEIGHBOR": _with(3, "half_pixel_centers", "align_corners"),
    "SLICE": _above(_FLAT, 5),
    "SPACE_TO_BATCH_ND": lambda op: 3 if _rank(op) != _FLAT else 1,
    "STRIDED_SLICE": _of_strided_slice,
    "SUB": _above(_FLAT, 3),
    "TRANSPOSE": lambda op: (
        6 if _rank(op) > _FLAT + 1 else 4 if _rank(op) > _FLAT else 1
    ),
    "TRANSPOSE_CONV": _of_transpose_conv,
    "WHERE": lambda op: 1 if op.inputs[0] and op.inputs[0].dtype == "bool" else 2,
}
"""Versions by options and ranks."""


def version_of(op: LiteOp) -> int:
    """Return the oldest version of a kernel that computes an op."""
    place = KINDS.get(op.kind, OTHER).data
    data = op.inputs[place] if place < len(op.inputs) else None
    dtype = "" if data is None else data.dtype
    by_type = _BY_TYPE.get(op.kind, {}).get(dtype, 1)
    by_option = _BY_OPTION.get(op.kind)
    try:
        return max(by_type, 1 if by_option is None else by_option(op))
    except (IndexError, ValueError):
        # It reads too few tensors, which `verify` and edits tell.
        return by_type


RUNTIME = "min_runtime_version"
"""The metadata that say which runtime has all kernels; loaders may ask for it."""
_ROOM = 16
"""The bytes that converters keep for the number."""

_RELEASE_ROWS = """
1.5: EMBEDDING_LOOKUP_SPARSE HASHTABLE_LOOKUP L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION
1.5: LSH_PROJECTION RELU_N1_TO_1 RESHAPE SKIP_GRAM
1.5 1.10: FAKE_QUANT
1.5 1.10 1.14 1.14 2.0 2.1 2.3 2.3 2.3 2.11 2.15 2.17 2.18 2.21: FULLY_CONNECTED
1.5 1.12 1.14 2.2 2.3 2.3 2.11: DEPTHWISE_CONV_2D
1.5 1.14: L2_NORMALIZATION SPACE_TO_DEPTH
1.5 1.14 1.14 2.3: SPLIT
1.5 1.14 1.14 2.3 2.4 2.9 2.11 2.15: CONV_2D
1.5 1.14 1.15 2.3 2.6 2.11 2.13 2.23: MUL
1.5 1.14 2.2 2.3: SVDF
1.5 1.14 2.3: AVERAGE_POOL_2D MAX_POOL_2D RNN SOFTMAX
1.5 1.14 2.3 2.14 2.21: CONCATENATION
1.5 1.14 2.4 2.6 2.13 2.23: ADD
1.5 1.14 2.4 2.6 2.20: PAD
1.5 1.14 2.5: RELU6
1.5 2.1 2.5: RELU
1.5 2.7 2.8 2.9 2.12 2.15 2.17 2.21: CAST
1.6 1.14 1.15 2.3 2.4 2.12 2.14.4 2.22: TRANSPOSE
1.6 1.14 1.15 2.4 2.5 2.13 2.15: GATHER
1.6 1.14 2.1 2.2 2.5 2.6 2.14 2.14: STRIDED_SLICE
1.6 1.14 2.3 2.4 2.4: SUB
1.6 1.14 2.3 2.12: BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND
1.6 1.14 2.4: MEAN
1.6 2.3: DIV
1.6 2.5: SQUEEZE
1.7 1.10 1.14 2.3: LSTM
1.7 1.14 2.13: TOPK_V2
1.7 1.14 2.2 2.5: RESIZE_BILINEAR
1.7 2.12: EXP
1.8: PRELU
1.9: FLOOR NEG SIN
1.9 1.14 1.15: SPARSE_TO_DENSE
1.9 1.14 2.4 2.6 2.20: PADV2
1.9 1.14 2.9: ARG_MAX ARG_MIN
1.9 2.2 2.3 2.13 2.15: TRANSPOSE_CONV
1.10: EXPAND_DIMS POW SHAPE
1.10 1.15: SUM
1.10 2.5 2.15: RSQRT
1.10 2.21: SQRT
1.10.1 2.2 2.8: TILE
1.11: LOGICAL_AND LOGICAL_NOT LOGICAL_OR ONE_HOT REDUCE_ANY
1.11 1.14 2.2 2.3 2.22: UNPACK
1.11 1.14 2.3 2.13: PACK
1.11 1.14 2.5: REDUCE_MAX REDUCE_MIN
1.11 2.6: REDUCE_PROD
1.12: SQUARE ZEROS_LIKE
1.13 1.14 1.14 2.18 2.21: EMBEDDING_LOOKUP
1.13 2.3 2.5 2.12: FILL
1.13 2.4 2.5 2.6 2.12: ABS
1.13 2.13: FLOOR_MOD
1.13 2.14: RANGE
1.13.1 1.14 1.15 2.2 2.7 2.18 2.21 2.22: DEQUANTIZE
1.13.1 1.14 2.3 2.4: RESIZE_NEAREST_NEIGHBOR
1.13.1 1.14 2.3 2.12: UNIDIRECTIONAL_SEQUENCE_LSTM
1.13.1 2.3: LEAKY_RELU SPLIT_V
1.13.1 2.3 2.12: MIRROR_PAD
1.13.1 2.5: SQUARED_DIFFERENCE
1.14: ADD_N CEIL COS ELU MATRIX_DIAG MATRIX_SET_DIAG RANK REVERSE_SEQUENCE ROUND UNIQUE
1.14 1.14: GREATER LESS_EQUAL LOG_SOFTMAX
1.14 1.14 1.14: BIDIRECTIONAL_SEQUENCE_LSTM
1.14 1.14 1.14 2.4 2.5 2.14 2.21: SLICE
1.14 1.14 2.3: BIDIRECTIONAL_SEQUENCE_RNN LOGISTIC TANH UNIDIRECTIONAL_SEQUENCE_RNN
1.14 1.14 2.3 2.3: MAXIMUM MINIMUM
1.14 1.14 2.3 2.13 2.21: EQUAL
1.14 1.14 2.3 2.21: NOT_EQUAL
1.14 1.14 2.12 2.12: SELECT
1.14 1.14 2.13: FLOOR_DIV GREATER_EQUAL LESS
1.14 1.15 2.7 2.21 2.21 2.21: QUANTIZE
1.14 2.2 2.5: REVERSE_V2
1.14 2.3 2.5 2.13 2.16: GATHER_ND
1.14 2.8: WHERE
1.14 2.15: LOG
1.15: HARD_SWISH IF WHILE
2.1: NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND
2.1 2.5: DEPTH_TO_SPACE
2.2: DENSIFY SEGMENT_SUM
2.2 2.12: SELECT_V2
2.3 2.3 2.4 2.5: BATCH_MATMUL
2.4: CUMSUM
2.5: CALL_ONCE COMPLEX_ABS CONV_3D HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT
2.5: HASHTABLE_SIZE IMAG REAL RFFT2D
2.5 2.5 2.5: BROADCAST_TO
2.6: ASSIGN_VARIABLE BROADCAST_ARGS CONV_3D_TRANSPOSE READ_VARIABLE REDUCE_ALL
2.6: VAR_HANDLE
2.8: BUCKETIZE MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM
2.9 2.9: GELU
2.9 2.17 2.19 2.20 2.21 2.22: DYNAMIC_UPDATE_SLICE
2.10: ATAN2 RELU_0_TO_1 UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM
2.11: UNSORTED_SEGMENT_MIN
2.11 2.12: SIGN
2.13: BITCAST BITWISE_XOR RIGHT_SHIFT
2.15: DILATE REDUCE_WINDOW STABLEHLO_RNG_BIT_GENERATOR STABLEHLO_SCATTER
2.16: STABLEHLO_ADD STABLEHLO_GATHER STABLEHLO_MAXIMUM STABLEHLO_MINIMUM
2.16: STABLEHLO_MULTIPLY STABLEHLO_PAD STABLEHLO_REDUCE_WINDOW
2.17: STABLEHLO_AND STABLEHLO_CASE STABLEHLO_CBRT STABLEHLO_COMPOSITE
2.17: STABLEHLO_SHIFT_LEFT
"""
"""The releases of a kind's versions from 1 on, and the kinds that have these."""
_RELEASES = {
    kind: releases.split()
    for releases, _, kinds in (row.partition(":") for row in _RELEASE_ROWS.split("\n"))
    for kind in kinds.split()
}


def runtime_of(ops: Iterable[LiteOp]) -> str:
    """Return the oldest TensorFlow that has the kernels of ops, such as "2.11.0"."""
    found: tuple[int, ...] = (0,)
    for kind, version in {(op.kind, op.version) for op in ops if not op.is_custom}:
        releases = _RELEASES.get(kind, [])
        # Any object can be set as a version; the writer refuses other ones.
        if version in range(1, len(releases) + 1):
            numbers = (*map(int, releases[version - 1].split(".")), 0)
            found = max(found, numbers[:3])
    return ".".join(map(str, found)) if any(found) else ""


def runtime_named(file: Contents) -> str:
    """Return the runtime that the metadata of a file name; "" if they name none."""
    entry = file.metadata.get(RUNTIME)
    if entry is None or entry.data is None:
        return ""
    return entry.data.tobytes().rstrip(b"\0").decode("ascii", "replace")


def runtime_needed(file: Contents) -> str:
    """Return the runtime that the metadata name, or a newer one that edits ask for.

    Kernels that the file was read with are left to the converter that wrote them.
    """
    named = runtime_named(file)
    known = {(code.kind, code.version) for code in file.codes}
    added = [op for op in file.ops if (op.kind, op.version) not in known]
    needed = runtime_of(added)
    is_number = all(part.isdecimal() for part in named.split("."))
    if not is_number or not needed or _numbers(needed) <= _numbers(named):
        return named
    return needed


def _numbers(runtime: str) -> tuple[int, ...]:
    return tuple(map(int, runtime.split(".")))


def runtime_entry(runtime: str) -> Buffer:
    """Return the metadata that name a runtime."""
    return Buffer(np.frombuffer(runtime.encode().ljust(_ROOM, b"\0"), np.uint8))


def name_runtime(file: Contents) -> None:
    """Let the metadata of a file name the runtime of its kernels, if they name any."""
    if RUNTIME in file.metadata:
        told = runtime_of(op for graph in file.graphs for op in graph.ops)
        file.metadata[RUNTIME] = runtime_entry(told)
