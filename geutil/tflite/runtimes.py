"""The oldest TensorFlow that has a kernel, by its kind and version.

Converters write the newest of a file's kernels into its metadata. The numbers are those
of TensorFlow's `lite/tools/versioning/runtime_version.cc` (2.23).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from geutil.tflite.parts import Buffer, Contents, LiteOp
from geutil.tflite.stripping import RUNTIME

_ROOM = 16
"""The bytes that converters keep for the number."""

_ROWS = """
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
    for releases, _, kinds in (row.partition(":") for row in _ROWS.split("\n"))
    for kind in kinds.split()
}


def runtime_of(ops: Iterable[LiteOp]) -> str:
    """Return the oldest TensorFlow that has the kernels of ops, such as "2.11.0".

    Kernels that the table does not hold count for nothing, as converters do it.

    Args:
        ops: the ops of a file.

    Returns:
        The number; "" if no kernel is known.

    Cost: linear in the ops.

    Example:
        >>> from geutil import tflite
        >>> from geutil.tflite.runtimes import runtime_of
        >>> runtime_of(tflite.LiteOp(kind, [], []) for kind in ("GELU", "RESHAPE"))
        '2.9.0'
    """
    found: tuple[int, ...] = (0,)
    for kind, version in {(op.kind, op.version) for op in ops if not op.is_custom}:
        releases = _RELEASES.get(kind, [])
        if version <= len(releases):
            numbers = (*map(int, releases[version - 1].split(".")), 0)
            found = max(found, numbers[:3])
    return ".".join(map(str, found)) if any(found) else ""


def name_runtime(file: Contents) -> None:
    """Let the metadata of a file name the runtime of its kernels, if they name any.

    Cost: linear in the ops.
    """
    if RUNTIME in file.metadata:
        told = runtime_of(op for graph in file.graphs for op in graph.ops)
        data = np.frombuffer(told.encode().ljust(_ROOM, b"\0"), np.uint8)
        file.metadata[RUNTIME] = Buffer(data)
