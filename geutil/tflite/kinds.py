"""The kinds of ops: the tensors, types, versions and steps that their kernels take.

Measured with the interpreter of ai-edge-litert 2.3.0, which refuses others: an op of
each kind in each type, and of each version. Counts are those of `Prepare` of each.

Kernels of integers: `tests/quantize/test_kernels.py` and `test_int16_kernels.py` run a
file of each op (TensorFlow 2.21, LiteRT 2.3). Those of int16 are within one step of the
simulation, softmax and tanh within two. Steps are those of TFLite's specification
(https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/quantization_spec).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import numpy as np

from geutil.tflite.parts import Array, LiteOp, LiteTensor, Quantization
from geutil.tflite.schema import DTYPES, PACKED_BITS

_TYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 32)},
    "bool": "bool",
    "c64": "complex64",
}


class StepRule(Enum):
    """The steps that a kernel of integers asks for of the values that it makes."""

    LAYER = "multiplies by weights of 8 bits and adds a bias"
    MAKES = "makes values in steps of their own"
    KEEPS = "makes values in the steps of its data"
    SELECTS = "makes values of its data, cut off at the ends of a range or not"
    JOINS = "reads several tensors in the steps of its result"
    FIXED = "makes values in steps that it has built in"
    READS = "makes no values, but indices, truth values or sizes"


@dataclass(frozen=True)
class Kind:
    """A kind of ops.

    Attributes:
        least: how many tensors its kernel reads at least; those behind can be left out.
        most: how many it reads at most; None where nothing counts them.
        version: the highest version of its kernel.
        data: the place of the input whose type the kernel goes by.
        is_alike: whether all inputs from there on have one type.
        makes: the type of its results: "data" for that of the data, the name of the
            option that says it, or "-" where the kernel reads it from the result.
        types: the types of the data; empty where these are any.
        rule: the steps that its kernel of integers asks for; None without such a one.
        widths: the types of activations that this kernel computes in.
    """

    least: int = 0
    most: int | None = None
    version: int = 1
    data: int = 0
    is_alike: bool = False
    makes: str = "-"
    types: tuple[str, ...] = ()
    rule: StepRule | None = None
    widths: tuple[str, ...] = ()


MANY = 1 << 31
"""Kernels that read any number of tensors read all of them."""


def _kind(row: str) -> tuple[str, Kind]:
    """Return the name and the facts of a kind from its row of the table."""
    name, reads, version, data, makes, steps, *types = row.split()
    least, _, most = reads.partition("-")
    counted = int(most or least) if reads[-1].isdigit() else MANY
    known = () if types == ["any"] else tuple(_TYPES[word] for word in types)
    return name, Kind(
        int(least.strip("+") or 0),
        None if reads == "-" else counted,
        int(version),
        int(data.strip("+")),
        data.endswith("+"),
        makes,
        known,
        # A rule ends in 16 where it holds for int16, too, and else in 8.
        None if steps == "-" else StepRule[steps.rstrip("168").upper()],
        () if steps == "-" else ("int8", "int16")[: 1 + steps.endswith("16")],
    )


KINDS: Mapping[str, Kind] = dict(
    map(
        _kind,
        """
        ABS 1 5 0 data makes16 f32 i8 i16 i32
        ADD 2 6 0+ data makes16 f32 f16 i8 i16 u8 i32 i64
        ADD_N 1+ 1 0+ data - f32 i32
        ARG_MAX 2 3 0 output_type reads8 f32 i8 u8 i32 bool
        ARG_MIN 2 3 0 output_type reads8 f32 i8 u8 i32 bool
        ASSIGN_VARIABLE 2 1 0 data - any
        ATAN2 2 1 0+ data - f32 f16 f64
        AVERAGE_POOL_2D 1 3 0 data keeps16 f32 i8 i16 u8
        BATCH_MATMUL 2 4 0 data makes16 f32 i8 i16
        BATCH_TO_SPACE_ND 3 4 0 data selects16 any
        BIDIRECTIONAL_SEQUENCE_LSTM - 3 0 data - any
        BIDIRECTIONAL_SEQUENCE_RNN - 3 0 data - any
        BITCAST 1 1 0 - - any
        BITWISE_XOR 2 1 0+ data - i8 i16 u8 i32 u32
        BROADCAST_TO 2 4 0 data selects16 any
        BUCKETIZE 1 1 0 int32 - any
        CALL_ONCE 0 1 0 data - any
        CAST 1 9 0 - - any
        CEIL 1 1 0 data - f32
        COMPLEX_ABS 1 1 0 - - c64
        CONCATENATION 1+ 7 0+ data joins16 f32 f16 i8 i16 u8 i32 i64 u32 bool i4
        CONV_2D 3 8 0 data layer16 f32 i8 i16 u8
        CONV_3D 2-3 1 0 data - f32
        CONV_3D_TRANSPOSE 3-4 1 2 data - any
        COS 1 2 0 data - f32 f16
        CUMSUM 2 1 0 data - f32 i32 i64
        DENSIFY 1 1 0 - - any
        DEPTHWISE_CONV_2D 3 7 0 data layer16 f32 i8 i16 u8
        DEPTH_TO_SPACE 1 2 0 data selects8 f32 i8 u8 i32 i64
        DEQUANTIZE 1 9 0 float32 - f16 i8 i16 u8 i4
        DIV 2 2 0+ data - f32 i8 i16 u8 i32
        DYNAMIC_UPDATE_SLICE 3 6 0 data - any
        ELU 1 1 0 data - f32 i8
        EMBEDDING_LOOKUP 2 5 1 data - any
        EQUAL 2 5 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64 bool
        EXP 1 2 0 data makes8 f32 i8 i16
        EXPAND_DIMS 2 1 0 data selects16 any
        FAKE_QUANT 1 2 0 data - any
        FILL 2 5 1 data joins16 any
        FLOOR 1 1 0 data - f32 f16
        FLOOR_DIV 2 3 0+ data - f32 i8 i16 i32
        FLOOR_MOD 2 2 0+ data - f32 i8 i16 i32 i64
        FULLY_CONNECTED 2-3 14 0 data layer16 f32 i8 i16 u8
        GATHER 2 8 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool i4
        GATHER_ND 2 6 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool
        GELU 1 3 0 data makes8 f32 f16 i8 i16 u8
        GREATER 2 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64
        GREATER_EQUAL 2 3 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64
        HARD_SWISH 1 1 0 data makes8 f32 i8 u8
        IF 1+ 1 0 - - any
        IMAG 1 1 0 - - c64
        L2_NORMALIZATION 1 2 0 data fixed8 f32 i8 u8
        L2_POOL_2D 1 1 0 data - f32
        LEAKY_RELU 1 2 0 data makes16 f32 i8 i16 u8
        LESS 2 3 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64
        LESS_EQUAL 2 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64
        LOCAL_RESPONSE_NORMALIZATION 1 1 0 data - f32
        LOG 1 2 0 data makes8 f32 i8 i16
        LOGICAL_AND 2 1 0+ bool - bool
        LOGICAL_NOT 1 1 0 bool - bool
        LOGICAL_OR 2 1 0+ bool - bool
        LOGISTIC 1 3 0 data fixed16 f32 f16 i8 i16 u8
        LOG_SOFTMAX 1 2 0 data fixed8 f32 i8 u8
        LSTM - 4 0 data - any
        MATRIX_SET_DIAG 2 1 0 data - any
        MAXIMUM 2 4 0+ data joins16 f32 f16 i8 i16 u8 i32 i64
        MAX_POOL_2D 1 3 0 data selects16 f32 i8 i16 u8
        MEAN 2 3 0 data makes16 f32 i8 i16 u8 i32 i64
        MINIMUM 2 4 0+ data joins16 f32 f16 i8 i16 u8 i32 i64
        MIRROR_PAD 2 3 0 data selects16 any
        MUL 2 8 0+ data makes16 f32 f16 i8 i16 u8 i32 i64 u32
        NEG 1 1 0 data - f32 f16 i8 i16 i32 i64
        NOT_EQUAL 2 4 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64 bool
        ONE_HOT 4 1 2 data - f32 i8 u8 i32 i64 bool
        PACK 1+ 5 0+ data joins16 f32 i8 i16 u8 i32 i64 u32
        PAD 2 6 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool
        PADV2 3 6 0 data selects8 f32 f16 i8 i16 u8 i32 i64 bool
        POW 2 1 0+ data - f32 i32
        PRELU 2 1 0+ data makes8 f32 i8 i16 u8
        QUANTIZE 1 6 0 - - f32 i8 i16 u8 i32
        RANDOM_STANDARD_NORMAL 1 1 0 - - any
        RANDOM_UNIFORM 1 1 0 - - any
        RANGE 3 2 0+ data - f32 i32 i64
        RANK 1 1 0 int32 reads16 any
        READ_VARIABLE 1 1 0 - - any
        REAL 1 1 0 - - c64
        REDUCE_ALL 2 1 0 bool - bool
        REDUCE_ANY 2 1 0 bool - bool
        REDUCE_MAX 2 3 0 data selects16 f32 i8 i16 u8 i32 i64
        REDUCE_MIN 2 3 0 data selects16 f32 i8 i16 u8 i32 i64
        REDUCE_PROD 2 2 0 data makes16 f32 i8 i16 u8 i32 i64
        RELU 1 3 0 data makes16 f32 i8 i16 u8
        RELU6 1 3 0 data makes16 f32 i8 i16 u8
        RELU_0_TO_1 1 1 0 data makes8 f32 i8 u8
        RELU_N1_TO_1 1 1 0 data makes8 f32 i8 u8
        RESHAPE 1-2 1 0 data selects16 any
        RESIZE_BILINEAR 2 4 0 data keeps16 f32 i8 i16 u8
        RESIZE_NEAREST_NEIGHBOR 2 4 0 data selects16 f32 f16 i8 i16 u8 i32 u32 bool
        REVERSE_SEQUENCE 2 1 0 data - f32 i16 u8 i32 i64
        REVERSE_V2 2 4 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool
        RFFT2D 2 1 0 - - any
        RIGHT_SHIFT 2 1 0+ data - i8 i16 u8 i32 u32
        RNN 5 3 0 data - any
        ROUND 1 1 0 data - f32 f16
        RSQRT 1 3 0 data makes8 f32 i8 i16
        SCATTER_ND 3 1 1 data - f32 i8 u8 i32 i64 bool
        SEGMENT_SUM 2 1 0 data - f32 i32
        SELECT 3 4 1+ data joins16 any
        SELECT_V2 3 2 1+ data joins16 any
        SHAPE 1 1 0 out_type reads16 any
        SIGN 1 2 0 data - f32 f64 i32
        SIN 1 2 0 data - f32 f16
        SLICE 3 8 0 data selects16 any
        SOFTMAX 1 4 0 data fixed16 f32 f16 i8 i16 u8
        SPACE_TO_BATCH_ND 3 4 0 data selects16 any
        SPACE_TO_DEPTH 1 2 0 data selects8 f32 i8 u8 i32 i64
        SPARSE_TO_DENSE 4 3 2 data - f32 i8 u8 i32 i64
        SPLIT 2 5 1 data selects16 f32 i8 i16 u8 i32 i64
        SPLIT_V 3 3 0 data selects16 f32 i8 i16 u8 i32 i64
        SQRT 1 2 0 data makes16 f32 i8 i16
        SQUARE 1 1 0 data - f32
        SQUARED_DIFFERENCE 2 2 0+ data makes8 f32 i8 i32
        SQUEEZE 1 2 0 data selects16 any
        STRIDED_SLICE 4 8 0 data selects16 any
        SUB 2 5 0+ data makes16 f32 i8 i16 u8 i32 i64
        SUM 2 2 0 data makes16 f32 i8 i16 u8 i32 i64
        SVDF - 4 0 data - any
        TANH 1 3 0 data fixed16 f32 f16 i8 i16 u8
        TILE 2 3 0 data selects16 any
        TOPK_V2 2 3 0 data selects16 f32 i8 i16 u8 i32 i64
        TRANSPOSE 2 9 0 data selects16 any
        TRANSPOSE_CONV 3-4 5 2 data layer16 f32 i8 i16 u8
        UNIDIRECTIONAL_SEQUENCE_LSTM - 4 0 data - any
        UNIDIRECTIONAL_SEQUENCE_RNN 5 3 0 data - any
        UNIQUE 1 1 0 - - f32 i8 i16 u8 i32 i64
        UNPACK 1 6 0 data selects16 f32 f16 i8 i16 u8 i32 bool
        UNSORTED_SEGMENT_MAX 3 1 0 data - any
        UNSORTED_SEGMENT_MIN 3 1 0 data - any
        UNSORTED_SEGMENT_PROD 3 1 0 data - any
        UNSORTED_SEGMENT_SUM 3 1 0 data - f32 i32
        VAR_HANDLE 0 1 0 resource - any
        WHERE 1 2 0 int64 - f32 i8 u8 i32 i64 u32 bool
        WHILE 1+ 1 0 - - any
        ZEROS_LIKE 1 1 0 data - f32 i32 i64
        """.strip().splitlines(),
    )
)
"""By the name of each: reads, version, data, makes, the rule of steps with the widest
type, types; "+" is for all behind."""
INEXACT = frozenset(("EXP", "GELU", "LOG", "RSQRT"))
"""Kinds whose kernels of int16 look values up in a table of 513, and are up to 80 steps
off; they are not used."""
OTHER = Kind()
"""A kind of which nothing is known: a custom one, or one without rules."""


STEPPED = ("int2", "int4", "int8", "int16", "uint4", "uint8")
"""Types that stand for other numbers in the tensors that kernels compute."""
BIASED: Mapping[str, tuple[int, int, int]] = {
    "CONV_2D": (0, 1, 2),
    "CONV_3D": (0, 1, 2),
    "DEPTHWISE_CONV_2D": (0, 1, 2),
    "FULLY_CONNECTED": (0, 1, 2),
    "TRANSPOSE_CONV": (2, 1, 3),
}
"""The places of input, weights and bias, whose scale is the product of theirs."""
_SHARED = (StepRule.JOINS, StepRule.KEEPS, StepRule.SELECTS)
ONE_SCALE = frozenset(
    {
        *(name for name, kind in KINDS.items() if kind.rule in _SHARED),
        *("ASSIGN_VARIABLE", "DYNAMIC_UPDATE_SLICE", "NEG", "READ_VARIABLE"),
        *("REVERSE_SEQUENCE", "SCATTER_ND"),
    }
)
"""Kinds whose kernels move or compare integers, and rescale none."""
FIXED_SCALE: Mapping[tuple[str, str], tuple[float, int]] = {
    ("L2_NORMALIZATION", "int8"): (1 / 128, 0),
    ("LOGISTIC", "int16"): (1 / 32768, 0),
    ("LOGISTIC", "int8"): (1 / 256, -128),
    ("LOG_SOFTMAX", "int8"): (16 / 256, 127),
    ("SOFTMAX", "int16"): (1 / 32768, 0),
    ("SOFTMAX", "int8"): (1 / 256, -128),
    ("TANH", "int16"): (1 / 32768, 0),
    ("TANH", "int8"): (1 / 128, 0),
}
"""The scale and zero point of results that a kernel has built in."""


def limits(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest integer of a type."""
    bits = PACKED_BITS.get(dtype)
    if bits is None:
        info = np.iinfo(DTYPES[dtype])
        return int(info.min), int(info.max)
    low = 0 if dtype[0] == "u" else -(2 ** (bits - 1))
    return low, low + 2**bits - 1


_INTEGERS = (*STEPPED, "int32", "uint16")


def faults_of_steps(
    steps: Quantization | None, dtype: str, sizes: Sequence[int]
) -> Iterator[str]:
    """Yield why a tensor of a type and shape cannot have steps."""
    if steps is None or steps.block or dtype not in _INTEGERS:
        return
    scales = np.asarray(steps.scales)
    if not scales.size or not (np.isfinite(scales).all() and (scales > 0).all()):
        yield f"has a scale that is not positive; scales are positive numbers: {scales}"
    if len(steps.zero_points) not in (1, scales.size):
        yield f"has {scales.size} scales and {len(steps.zero_points)} zero points"
    if len(scales) > 1:
        count = sizes[steps.axis] if 0 <= steps.axis < len(sizes) else 0
        if count != len(scales):
            yield f"has {len(scales)} scales for {count} indices"
    # Kernels of 16 bits have no place for a zero point.
    low, high = (0, 0) if dtype == "int16" else limits(dtype)
    if any(not low <= zero <= high for zero in steps.zero_points):
        yield (
            f"has a zero point outside of {dtype}, which is from {low} to {high}, not "
            f"{steps.zero_points[0]}"
        )


def numbers_of(integers: Array, steps: Quantization) -> Array:
    """Return the numbers that integers stand for, in float32."""
    scales, zeros = _along(integers, steps)
    exact = (integers.astype(np.int64) - zeros) * scales.astype(np.float64)
    made: Array = exact.astype(np.float32)
    return made


def _along(integers: Array, steps: Quantization) -> tuple[Array, Array]:
    """Return scales and zero points that broadcast over values, those of blocks too."""
    if not steps.block:
        return steps.along(integers.ndim)
    found = []
    for tensor in (steps.block_scales, steps.block_zeros):
        value = None if tensor is None else tensor.value
        each = np.zeros(1) if value is None else value.astype(np.float64)
        if each.size > 1:
            each = each.reshape(*integers.shape[:-1], -1).repeat(steps.block, -1)
        found.append(each)
    return found[0], found[1]


def integers_of(numbers: Array, steps: Quantization, dtype: str) -> tuple[Array, Array]:
    """Return the integers that stand for numbers, and which of these were clipped.

    Halves are rounded away from zero, as TFLite does.
    """
    scales, zeros = _along(numbers, steps)
    exact = numbers.astype(np.float64) / scales
    wanted = np.trunc(exact + np.copysign(0.5, exact)) + zeros
    low, high = limits(dtype)
    stored = np.clip(wanted, low, high)
    return stored.astype(DTYPES.get(dtype, np.int8)), stored != wanted


Three = tuple[LiteTensor | None, LiteTensor | None, LiteTensor | None]


def layer_inputs(op: LiteOp) -> Three:
    """Return the input, weights and bias of an op; None for those that it lacks."""
    places = None if op.is_custom else BIASED.get(op.kind)
    if places is None:
        return None, None, None
    read = dict(enumerate(op.inputs))
    return read.get(places[0]), read.get(places[1]), read.get(places[2])


def bias_steps(
    op: LiteOp, new: Mapping[LiteTensor, Quantization] = MappingProxyType({})
) -> Quantization | None:
    """Return the steps of an op's bias where some tensors have new ones, or None."""
    x, weights, bias = layer_inputs(op)
    if x is None or weights is None or bias is None or bias.dtype not in _WIDE:
        return None
    of_x, of_weights = (new.get(t, t.quantization) for t in (x, weights))
    if of_x is None or of_weights is None or of_weights.block:
        return None
    scale = np.float32(of_x.scales[0])
    scales = tuple(float(scale * np.float32(s)) for s in of_weights.scales)
    return replace(of_weights, scales=scales, zero_points=(0,) * len(scales), axis=0)


_WIDE = ("int32", "int64")


def one_step(tensor: LiteTensor) -> tuple[float, int] | None:
    """Return the scale and zero point of a tensor; None if it has not just one."""
    steps = tensor.quantization
    if steps is None or len(steps.scales) != 1:
        return None
    return steps.scales[0], steps.zero_points[0]


def have_equal_steps(one: LiteTensor, other: LiteTensor) -> bool:
    """Tell whether two tensors have the same type, scale and zero point."""
    first, second = one_step(one), one_step(other)
    return (
        first is not None
        and second is not None
        and one.dtype == other.dtype
        and first[1] == second[1]
        # Kernels that rescale nothing allow this: kernels/pooling.cc.
        and abs(first[0] - second[0]) <= 1e-6
    )
