"""Ops and their tensors: whether these fit the kernel, by the kind of the op.

Each check yields a sentence for each fault of one op. `verify` runs them on a file;
edits run them on the ops that they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite import state
from geutil.tflite.parts import LiteOp, LiteTensor
from geutil.tflite.schema import kind_number, option_fault
from geutil.tflite.shapes import output_shapes, output_types
from geutil.tflite.steps import BIASED, FIXED_SCALE, ONE_SCALE, STEPPED, one_step

_HIGHEST: Mapping[str, int] = {
    kind: version
    for version, kinds in {
        2: (
            "COS DEPTH_TO_SPACE DIV EXP FAKE_QUANT FLOOR_MOD GREATER "
            "L2_NORMALIZATION LEAKY_RELU LESS_EQUAL LOG LOG_SOFTMAX RANGE "
            "REDUCE_PROD SELECT_V2 SIGN SIN SPACE_TO_DEPTH SQRT SQUARED_DIFFERENCE "
            "SQUEEZE SUM WHERE"
        ),
        3: (
            "ARG_MAX ARG_MIN AVERAGE_POOL_2D BIDIRECTIONAL_SEQUENCE_LSTM "
            "BIDIRECTIONAL_SEQUENCE_RNN FLOOR_DIV GELU GREATER_EQUAL LESS LOGISTIC "
            "MAX_POOL_2D MEAN MIRROR_PAD REDUCE_MAX REDUCE_MIN RELU RELU6 RNN RSQRT "
            "SPARSE_TO_DENSE SPLIT_V TANH TILE TOPK_V2 UNIDIRECTIONAL_SEQUENCE_RNN"
        ),
        4: (
            "BATCH_MATMUL BATCH_TO_SPACE_ND BROADCAST_TO LSTM MAXIMUM MINIMUM "
            "NOT_EQUAL RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 SELECT "
            "SOFTMAX SPACE_TO_BATCH_ND SVDF UNIDIRECTIONAL_SEQUENCE_LSTM"
        ),
        5: "ABS EMBEDDING_LOOKUP EQUAL FILL PACK SPLIT SUB TRANSPOSE_CONV",
        6: "ADD DYNAMIC_UPDATE_SLICE GATHER_ND PAD PADV2 QUANTIZE UNPACK",
        7: "CONCATENATION DEPTHWISE_CONV_2D",
        8: "CONV_2D GATHER MUL SLICE STRIDED_SLICE",
        9: "CAST DEQUANTIZE TRANSPOSE",
        14: "FULLY_CONNECTED",
    }.items()
    for kind in kinds.split()
}
"""The highest version of a kernel, where it is not 1.

Measured: ops of each version given to the interpreter of ai-edge-litert 2.3.0, which
refuses those that it lacks.
"""


def _kind(op: LiteOp) -> Iterator[str]:
    if op.is_custom:
        return
    try:
        kind_number(op.kind)
    except KeyError:
        yield "TFLite has no such kind; an op of your own needs custom_options"
        return
    highest = _HIGHEST.get(op.kind, 1)
    if not 1 <= op.version <= highest:
        yield f"its version is {op.version}, and the runtime has {highest}"
    faults = (option_fault(op.table, *option) for option in op.options.items())
    yield from filter(None, faults)


_COUNTS: Mapping[str, tuple[int, int]] = {
    kind: counts
    for counts, kinds in {
        (1, 1): (
            "ABS AVERAGE_POOL_2D CAST CEIL COMPLEX_ABS COS DENSIFY DEPTH_TO_SPACE "
            "DEQUANTIZE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH IMAG "
            "L2_NORMALIZATION L2_POOL_2D LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION "
            "LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX MAX_POOL_2D NEG QUANTIZE RANK "
            "READ_VARIABLE REAL RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT "
            "SHAPE SIGN SIN SOFTMAX SPACE_TO_DEPTH SQRT SQUARE SQUEEZE TANH "
            "UNIQUE UNPACK WHERE ZEROS_LIKE"
        ),
        (1, 2): "RESHAPE",
        (2, 2): (
            "ADD ARG_MAX ARG_MIN ASSIGN_VARIABLE ATAN2 BATCH_MATMUL BROADCAST_TO "
            "CUMSUM DIV EQUAL EXPAND_DIMS FILL FLOOR_DIV FLOOR_MOD GATHER "
            "GATHER_ND GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND "
            "LOGICAL_OR MAXIMUM MEAN MINIMUM MIRROR_PAD MUL NOT_EQUAL PAD POW "
            "PRELU REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD "
            "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 "
            "SEGMENT_SUM SPLIT SQUARED_DIFFERENCE SUB SUM TILE TOPK_V2 TRANSPOSE"
        ),
        (2, 3): "CONV_2D CONV_3D DEPTHWISE_CONV_2D FULLY_CONNECTED",
        (3, 3): (
            "BATCH_TO_SPACE_ND DYNAMIC_UPDATE_SLICE PADV2 RANGE SCATTER_ND SELECT "
            "SELECT_V2 SLICE SPACE_TO_BATCH_ND SPLIT_V"
        ),
        (3, 4): "TRANSPOSE_CONV",
        (4, 4): "ONE_HOT SPARSE_TO_DENSE STRIDED_SLICE",
    }.items()
    for kind in kinds.split()
}
"""How many tensors kernels take at least and at most; `Prepare` of each counts them."""


def _count(op: LiteOp) -> Iterator[str]:
    least, most = _COUNTS.get(op.kind, (0, len(op.inputs)))
    if not op.is_custom and not least <= len(op.inputs) <= most:
        takes = f"{least}" if least == most else f"{least} to {most}"
        yield f"reads {len(op.inputs)} tensors, and its kernel takes {takes}"


def _types(op: LiteOp) -> Iterator[str]:
    for t, dtype in zip(op.outputs, output_types(op), strict=False):
        if dtype is not None and t.dtype != dtype:
            yield f"makes {dtype}, and {t!r} is {t.dtype}"
    if op.kind in _COUNTS and op.kind not in state.TAKE_HANDLES:
        for t in op.reads:
            if t.dtype in ("resource", "variant"):
                yield f"cannot read {t!r}, which is a handle"


def _shapes(op: LiteOp) -> Iterator[str]:
    try:
        shapes = output_shapes(op)
    except TFLiteError as error:
        yield str(error)
        return
    for t, shape in zip(op.outputs, shapes, strict=False):
        stated = t.shape
        if shape is None or stated is None or not (stated or t.record.hasRank):
            continue
        pairs = zip(shape, stated, strict=False)
        if len(shape) != len(stated) or any(
            a != b for a, b in pairs if a is not None and b is not None
        ):
            yield f"makes {[*shape]}, and {t!r} is {[*stated]}"


_ROUNDING = 1e-6
"""A product of two float32 scales is rounded to 2^-23 of itself: two of them differ
by 2.4e-7."""


def _bias(op: LiteOp) -> Iterator[str]:
    places = BIASED.get(op.kind)
    if op.is_custom or places is None or places[2] >= len(op.inputs):
        return
    x, weights, bias = (op.inputs[place] for place in places)
    steps = [t.quantization if t else None for t in (x, weights, bias)]
    if bias is None or bias.dtype not in ("int32", "int64"):
        return
    if any(s is None or s.block for s in steps):
        return
    of_x, of_weights, of_bias = (np.asarray(s.scales) for s in steps if s)
    if of_x.size != 1 or of_bias.size not in (1, of_weights.size):
        counts = f"{of_x.size}, {of_weights.size} and {of_bias.size}"
        yield f"input, weights and bias have {counts} scales"
    elif not np.allclose(of_bias, of_x * of_weights, rtol=_ROUNDING, atol=0):
        product = (of_x * of_weights).flat[0]
        fault = f"its bias has the scale {of_bias.flat[0]:.6g}, input and weights"
        yield f"{fault} {product:.6g}"


def _scales(op: LiteOp) -> Iterator[str]:
    if op.is_custom:
        return
    for t in op.outputs:
        fixed = FIXED_SCALE.get((op.kind, t.dtype))
        if fixed is not None and one_step(t) is not None and not _same(t, *fixed):
            yield f"its kernel gives scale {fixed[0]:.6g}, zero {fixed[1]}"
    if op.kind not in ONE_SCALE:
        return
    ends = [t for t in (*op.inputs, *op.outputs) if t and t.dtype in STEPPED]
    stepped = [t for t in ends if one_step(t) is not None]
    for t in stepped[1:]:
        scale, zero = one_step(stepped[0]) or (0.0, 0)
        if not _same(t, scale, zero):
            yield f"rescales nothing, and {stepped[0]!r} and {t!r} differ"


def _same(tensor: LiteTensor, scale: float, zero: int) -> bool:
    own = one_step(tensor)
    return own is not None and own[1] == zero and abs(own[0] - scale) <= 1e-6 * scale


OP_CHECKS: Mapping[str, Callable[[LiteOp], Iterator[str]]] = {
    "kinds": _kind,
    "counts": _count,
    "types": _types,
    "shapes": _shapes,
    "biases": _bias,
    "scales": _scales,
}
"""The checks by the invariants of `verify`."""


def faults(op: LiteOp) -> list[str]:
    """Return why the tensors of an op do not fit its kernel."""
    return [fault for check in OP_CHECKS.values() for fault in check(op)]


def check_fits(op: LiteOp, reads: Sequence[LiteTensor | None] | None = None) -> None:
    """Refuse an op whose tensors do not fit its kernel.

    Args:
        op: the op.
        reads: the tensors that it will read; faults that it has already are no reason.

    Raises:
        TFLiteError: with the first fault.
    """
    if reads is None:
        new = faults(op)
    else:
        edited = op.copied({})
        edited.inputs = reads
        before = faults(op)
        new = [fault for fault in faults(edited) if fault not in before]
    if new:
        raise TFLiteError(f"{op!r}: {new[0]}")
