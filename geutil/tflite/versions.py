"""Versions of kernels by the types that an op computes in.

The table holds the kinds that edits make, or change the types of; it is that of
TensorFlow's `lite/tools/versioning/op_version.cc`, which the converter writes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from geutil.tflite.kinds import KINDS, OTHER
from geutil.tflite.parts import LiteOp

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


def _of_quantize(op: LiteOp) -> int:
    source, made = op.inputs[0], op.outputs[0]
    types = {made.dtype, "" if source is None else source.dtype}
    if "int4" in types:
        return 4
    if len(made.quantization.scales if made.quantization else ()) > 1:
        return 3
    return 2 if made.dtype == "int16" else 1


def _of_dequantize(op: LiteOp) -> int:
    source = op.inputs[0]
    steps = None if source is None else source.quantization
    return 5 if steps is not None and len(steps.scales) > 1 else 1


def _of_fully_connected(op: LiteOp) -> int:
    if len(op.inputs) == len(("input", "weights")):
        return 6
    return 5 if op.options.get("keep_num_dims") else 1


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


def _of_convolution(op: LiteOp) -> int:
    shapes = [t.shape or () for t in op.inputs[:2] if t is not None]
    grouped = shapes[0][-1] != shapes[1][-1]
    return 6 if grouped else 1


def _of_depthwise(op: LiteOp) -> int:
    factors = (op.options.get(f"dilation_{letter}_factor", 1) for letter in "hw")
    return 2 if any(factor > 1 for factor in factors) else 1


def _above(rank: int, version: int) -> Callable[[LiteOp], int]:
    return lambda op: version if _rank(op) > rank else 1


def _with(version: int, *options: str) -> Callable[[LiteOp], int]:
    return lambda op: version if any(op.options.get(o) for o in options) else 1


_BY_OPTION: Mapping[str, Callable[[LiteOp], int]] = {
    "BROADCAST_TO": lambda op: 2,
    "BATCH_TO_SPACE_ND": lambda op: 3 if _rank(op) != _FLAT else 1,
    "CONV_2D": _of_convolution,
    "DEPTHWISE_CONV_2D": _of_depthwise,
    "DEQUANTIZE": _of_dequantize,
    "DIV": _above(_FLAT, 2),
    "FULLY_CONNECTED": _of_fully_connected,
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
