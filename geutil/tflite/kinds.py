"""The kinds of ops, their kernels, and the types that ops compute in.

The tensors, types, versions and steps that each kernel takes were measured with the
interpreter of ai-edge-litert 2.3.0, which refuses others: an op of each kind in each
type, and of each version. Counts are those of `Prepare` of each.

Kernels of integers: `tests/quantize/test_kernels.py` and `test_int16_kernels.py` run a
file of each op (TensorFlow 2.21, LiteRT 2.3). Those of int16 are within one step of the
simulation, softmax and tanh within two. Steps are those of TFLite's specification
(https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/quantization_spec).

Kernels are slow on CPUs that are plain loops, where float ones are not: measured by
`python -m benchmarks.quantized.kernels` with LiteRT 2.3 on one thread of an x86 machine
with XNNPACK, each op alone with the data of a middle layer.

The table of versions by types holds the kinds that edits make, or change the types of;
it is that of TensorFlow's `lite/tools/versioning/op_version.cc`, which the converter
writes by. The releases are those of `runtime_version.cc` (2.23) beside it; converters
write the newest of a file's kernels into its metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import numpy as np

from geutil.tflite.parts import (
    Array,
    Buffer,
    Contents,
    LiteOp,
    LiteTensor,
    Quantization,
)
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
        releases: the first TensorFlow with each version, where that is known.
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
    releases: tuple[str, ...] = ()


MANY = 1 << 31
"""Kernels that read any number of tensors read all of them."""


def _kind(row: str) -> tuple[str, Kind]:
    """Return the name and the facts of a kind from its row of the table."""
    facts, _, versions = row.partition(":")
    name, reads, data, makes, steps, *types = facts.split()
    releases = versions.split()
    least, _, most = reads.partition("-")
    counted = int(most or least) if reads[-1].isdigit() else MANY
    known = () if types == ["any"] else tuple(_TYPES[word] for word in types)
    return name, Kind(
        int(least.strip("+") or 0),
        None if reads == "-" else counted,
        len(releases),
        int(data.strip("+")),
        data.endswith("+"),
        makes,
        known,
        # A rule ends in 16 where it holds for int16, too, and else in 8.
        None if steps == "-" else StepRule[steps.rstrip("168").upper()],
        () if steps == "-" else ("int8", "int16")[: 1 + steps.endswith("16")],
        tuple(release for release in releases if release != "?"),
    )


_ROWS = """
ABS 1 0 data makes16 f32 i8 i16 i32: 1.13 2.4 2.5 2.6 2.12
ADD 2 0+ data makes16 f32 f16 i8 i16 u8 i32 i64: 1.5 1.14 2.4 2.6 2.13 2.23
ADD_N 1+ 0+ data - f32 i32: 1.14
ARG_MAX 2 0 output_type reads8 f32 i8 u8 i32 bool: 1.9 1.14 2.9
ARG_MIN 2 0 output_type reads8 f32 i8 u8 i32 bool: 1.9 1.14 2.9
ASSIGN_VARIABLE 2 0 data - any: 2.6
ATAN2 2 0+ data - f32 f16 f64: 2.10
AVERAGE_POOL_2D 1 0 data keeps16 f32 i8 i16 u8: 1.5 1.14 2.3
BATCH_MATMUL 2 0 data makes16 f32 i8 i16: 2.3 2.3 2.4 2.5
BATCH_TO_SPACE_ND 3 0 data selects16 any: 1.6 1.14 2.3 2.12
BIDIRECTIONAL_SEQUENCE_LSTM - 0 data - any: 1.14 1.14 1.14
BIDIRECTIONAL_SEQUENCE_RNN - 0 data - any: 1.14 1.14 2.3
BITCAST 1 0 - - any: 2.13
BITWISE_XOR 2 0+ data - i8 i16 u8 i32 u32: 2.13
BROADCAST_ARGS - 0 - - any: 2.6
BROADCAST_TO 2 0 data selects16 any: 2.5 2.5 2.5 ?
BUCKETIZE 1 0 int32 - any: 2.8
CALL_ONCE 0 0 data - any: 2.5
CAST 1 0 - - any: 1.5 2.7 2.8 2.9 2.12 2.15 2.17 2.21 ?
CEIL 1 0 data - f32: 1.14
COMPLEX_ABS 1 0 - - c64: 2.5
CONCATENATION 1+ 0+ data joins16 f32 f16 i8 i16 u8 i32 i64 u32 bool i4: 1.5 1.14
    2.3 2.14 2.21 ? ?
CONV_2D 3 0 data layer16 f32 i8 i16 u8: 1.5 1.14 1.14 2.3 2.4 2.9 2.11 2.15
CONV_3D 2-3 0 data - f32: 2.5
CONV_3D_TRANSPOSE 3-4 2 data - any: 2.6
COS 1 0 data - f32 f16: 1.14 ?
CUMSUM 2 0 data - f32 i32 i64: 2.4
DENSIFY 1 0 - - any: 2.2
DEPTHWISE_CONV_2D 3 0 data layer16 f32 i8 i16 u8: 1.5 1.12 1.14 2.2 2.3 2.3 2.11
DEPTH_TO_SPACE 1 0 data selects8 f32 i8 u8 i32 i64: 2.1 2.5
DEQUANTIZE 1 0 float32 - f16 i8 i16 u8 i4: 1.13.1 1.14 1.15 2.2 2.7 2.18 2.21
    2.22 ?
DILATE - 0 - - any: 2.15
DIV 2 0+ data - f32 i8 i16 u8 i32: 1.6 2.3
DYNAMIC_UPDATE_SLICE 3 0 data - any: 2.9 2.17 2.19 2.20 2.21 2.22
ELU 1 0 data - f32 i8: 1.14
EMBEDDING_LOOKUP 2 1 data - any: 1.13 1.14 1.14 2.18 2.21
EMBEDDING_LOOKUP_SPARSE - 0 - - any: 1.5
EQUAL 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64 bool: 1.14 1.14 2.3 2.13 2.21
EXP 1 0 data makes8 f32 i8 i16: 1.7 2.12
EXPAND_DIMS 2 0 data selects16 any: 1.10
FAKE_QUANT 1 0 data - any: 1.5 1.10
FILL 2 1 data joins16 any: 1.13 2.3 2.5 2.12 ?
FLOOR 1 0 data - f32 f16: 1.9
FLOOR_DIV 2 0+ data - f32 i8 i16 i32: 1.14 1.14 2.13
FLOOR_MOD 2 0+ data - f32 i8 i16 i32 i64: 1.13 2.13
FULLY_CONNECTED 2-3 0 data layer16 f32 i8 i16 u8: 1.5 1.10 1.14 1.14 2.0 2.1 2.3
    2.3 2.3 2.11 2.15 2.17 2.18 2.21
GATHER 2 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool i4: 1.6 1.14 1.15 2.4
    2.5 2.13 2.15 ?
GATHER_ND 2 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool: 1.14 2.3 2.5 2.13
    2.16 ?
GELU 1 0 data makes8 f32 f16 i8 i16 u8: 2.9 2.9 ?
GREATER 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14
GREATER_EQUAL 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14 2.13
HARD_SWISH 1 0 data makes8 f32 i8 u8: 1.15
HASHTABLE - 0 - - any: 2.5
HASHTABLE_FIND - 0 - - any: 2.5
HASHTABLE_IMPORT - 0 - - any: 2.5
HASHTABLE_LOOKUP - 0 - - any: 1.5
HASHTABLE_SIZE - 0 - - any: 2.5
IF 1+ 0 - - any: 1.15
IMAG 1 0 - - c64: 2.5
L2_NORMALIZATION 1 0 data fixed8 f32 i8 u8: 1.5 1.14
L2_POOL_2D 1 0 data - f32: 1.5
LEAKY_RELU 1 0 data makes16 f32 i8 i16 u8: 1.13.1 2.3
LESS 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14 2.13
LESS_EQUAL 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14
LOCAL_RESPONSE_NORMALIZATION 1 0 data - f32: 1.5
LOG 1 0 data makes8 f32 i8 i16: 1.14 2.15
LOGICAL_AND 2 0+ bool - bool: 1.11
LOGICAL_NOT 1 0 bool - bool: 1.11
LOGICAL_OR 2 0+ bool - bool: 1.11
LOGISTIC 1 0 data fixed16 f32 f16 i8 i16 u8: 1.14 1.14 2.3
LOG_SOFTMAX 1 0 data fixed8 f32 i8 u8: 1.14 1.14
LSH_PROJECTION - 0 - - any: 1.5
LSTM - 0 data - any: 1.7 1.10 1.14 2.3
MATRIX_DIAG - 0 - - any: 1.14
MATRIX_SET_DIAG 2 0 data - any: 1.14
MAXIMUM 2 0+ data joins16 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14 2.3 2.3
MAX_POOL_2D 1 0 data selects16 f32 i8 i16 u8: 1.5 1.14 2.3
MEAN 2 0 data makes16 f32 i8 i16 u8 i32 i64: 1.6 1.14 2.4
MINIMUM 2 0+ data joins16 f32 f16 i8 i16 u8 i32 i64: 1.14 1.14 2.3 2.3
MIRROR_PAD 2 0 data selects16 any: 1.13.1 2.3 2.12
MUL 2 0+ data makes16 f32 f16 i8 i16 u8 i32 i64 u32: 1.5 1.14 1.15 2.3 2.6 2.11
    2.13 2.23
MULTINOMIAL - 0 - - any: 2.8
NEG 1 0 data - f32 f16 i8 i16 i32 i64: 1.9
NON_MAX_SUPPRESSION_V4 - 0 - - any: 2.1
NON_MAX_SUPPRESSION_V5 - 0 - - any: 2.1
NOT_EQUAL 2 0+ bool reads8 f32 f16 i8 i16 u8 i32 i64 bool: 1.14 1.14 2.3 2.21
ONE_HOT 4 2 data - f32 i8 u8 i32 i64 bool: 1.11
PACK 1+ 0+ data joins16 f32 i8 i16 u8 i32 i64 u32: 1.11 1.14 2.3 2.13 ?
PAD 2 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool: 1.5 1.14 2.4 2.6 2.20 ?
PADV2 3 0 data selects8 f32 f16 i8 i16 u8 i32 i64 bool: 1.9 1.14 2.4 2.6 2.20 ?
POW 2 0+ data - f32 i32: 1.10
PRELU 2 0+ data makes8 f32 i8 i16 u8: 1.8
QUANTIZE 1 0 - - f32 i8 i16 u8 i32: 1.14 1.15 2.7 2.21 2.21 2.21
RANDOM_STANDARD_NORMAL 1 0 - - any: 2.8
RANDOM_UNIFORM 1 0 - - any: 2.8
RANGE 3 0+ data - f32 i32 i64: 1.13 2.14
RANK 1 0 int32 reads16 any: 1.14
READ_VARIABLE 1 0 - - any: 2.6
REAL 1 0 - - c64: 2.5
REDUCE_ALL 2 0 bool - bool: 2.6
REDUCE_ANY 2 0 bool - bool: 1.11
REDUCE_MAX 2 0 data selects16 f32 i8 i16 u8 i32 i64: 1.11 1.14 2.5
REDUCE_MIN 2 0 data selects16 f32 i8 i16 u8 i32 i64: 1.11 1.14 2.5
REDUCE_PROD 2 0 data makes16 f32 i8 i16 u8 i32 i64: 1.11 2.6
REDUCE_WINDOW - 0 - - any: 2.15
RELU 1 0 data makes16 f32 i8 i16 u8: 1.5 2.1 2.5
RELU6 1 0 data makes16 f32 i8 i16 u8: 1.5 1.14 2.5
RELU_0_TO_1 1 0 data makes8 f32 i8 u8: 2.10
RELU_N1_TO_1 1 0 data makes8 f32 i8 u8: 1.5
RESHAPE 1-2 0 data selects16 any: 1.5
RESIZE_BILINEAR 2 0 data keeps16 f32 i8 i16 u8: 1.7 1.14 2.2 2.5
RESIZE_NEAREST_NEIGHBOR 2 0 data selects16 f32 f16 i8 i16 u8 i32 u32 bool:
    1.13.1 1.14 2.3 2.4
REVERSE_SEQUENCE 2 0 data - f32 i16 u8 i32 i64: 1.14
REVERSE_V2 2 0 data selects16 f32 f16 i8 i16 u8 i32 i64 bool: 1.14 2.2 2.5 ?
RFFT2D 2 0 - - any: 2.5
RIGHT_SHIFT 2 0+ data - i8 i16 u8 i32 u32: 2.13
RNN 5 0 data - any: 1.5 1.14 2.3
ROUND 1 0 data - f32 f16: 1.14
RSQRT 1 0 data makes8 f32 i8 i16: 1.10 2.5 2.15
SCATTER_ND 3 1 data - f32 i8 u8 i32 i64 bool: 2.1
SEGMENT_SUM 2 0 data - f32 i32: 2.2
SELECT 3 1+ data joins16 any: 1.14 1.14 2.12 2.12
SELECT_V2 3 1+ data joins16 any: 2.2 2.12
SHAPE 1 0 out_type reads16 any: 1.10
SIGN 1 0 data - f32 f64 i32: 2.11 2.12
SIN 1 0 data - f32 f16: 1.9 ?
SKIP_GRAM - 0 - - any: 1.5
SLICE 3 0 data selects16 any: 1.14 1.14 1.14 2.4 2.5 2.14 2.21 ?
SOFTMAX 1 0 data fixed16 f32 f16 i8 i16 u8: 1.5 1.14 2.3 ?
SPACE_TO_BATCH_ND 3 0 data selects16 any: 1.6 1.14 2.3 2.12
SPACE_TO_DEPTH 1 0 data selects8 f32 i8 u8 i32 i64: 1.5 1.14
SPARSE_TO_DENSE 4 2 data - f32 i8 u8 i32 i64: 1.9 1.14 1.15
SPLIT 2 1 data selects16 f32 i8 i16 u8 i32 i64: 1.5 1.14 1.14 2.3 ?
SPLIT_V 3 0 data selects16 f32 i8 i16 u8 i32 i64: 1.13.1 2.3 ?
SQRT 1 0 data makes16 f32 i8 i16: 1.10 2.21
SQUARE 1 0 data - f32: 1.12
SQUARED_DIFFERENCE 2 0+ data makes8 f32 i8 i32: 1.13.1 2.5
SQUEEZE 1 0 data selects16 any: 1.6 2.5
STABLEHLO_ADD - 0 - - any: 2.16
STABLEHLO_AND - 0 - - any: 2.17
STABLEHLO_CASE - 0 - - any: 2.17
STABLEHLO_CBRT - 0 - - any: 2.17
STABLEHLO_COMPOSITE - 0 - - any: 2.17
STABLEHLO_GATHER - 0 - - any: 2.16
STABLEHLO_MAXIMUM - 0 - - any: 2.16
STABLEHLO_MINIMUM - 0 - - any: 2.16
STABLEHLO_MULTIPLY - 0 - - any: 2.16
STABLEHLO_PAD - 0 - - any: 2.16
STABLEHLO_REDUCE_WINDOW - 0 - - any: 2.16
STABLEHLO_RNG_BIT_GENERATOR - 0 - - any: 2.15
STABLEHLO_SCATTER - 0 - - any: 2.15
STABLEHLO_SHIFT_LEFT - 0 - - any: 2.17
STRIDED_SLICE 4 0 data selects16 any: 1.6 1.14 2.1 2.2 2.5 2.6 2.14 2.14
SUB 2 0+ data makes16 f32 i8 i16 u8 i32 i64: 1.6 1.14 2.3 2.4 2.4
SUM 2 0 data makes16 f32 i8 i16 u8 i32 i64: 1.10 1.15
SVDF - 0 data - any: 1.5 1.14 2.2 2.3
TANH 1 0 data fixed16 f32 f16 i8 i16 u8: 1.14 1.14 2.3
TILE 2 0 data selects16 any: 1.10.1 2.2 2.8
TOPK_V2 2 0 data selects16 f32 i8 i16 u8 i32 i64: 1.7 1.14 2.13
TRANSPOSE 2 0 data selects16 any: 1.6 1.14 1.15 2.3 2.4 2.12 2.14.4 2.22 ?
TRANSPOSE_CONV 3-4 2 data layer16 f32 i8 i16 u8: 1.9 2.2 2.3 2.13 2.15
UNIDIRECTIONAL_SEQUENCE_LSTM - 0 data - any: 1.13.1 1.14 2.3 2.12
UNIDIRECTIONAL_SEQUENCE_RNN 5 0 data - any: 1.14 1.14 2.3
UNIQUE 1 0 - - f32 i8 i16 u8 i32 i64: 1.14
UNPACK 1 0 data selects16 f32 f16 i8 i16 u8 i32 bool: 1.11 1.14 2.2 2.3 2.22 ?
UNSORTED_SEGMENT_MAX 3 0 data - any: 2.10
UNSORTED_SEGMENT_MIN 3 0 data - any: 2.11
UNSORTED_SEGMENT_PROD 3 0 data - any: 2.10
UNSORTED_SEGMENT_SUM 3 0 data - f32 i32: 2.10
VAR_HANDLE 0 0 resource - any: 2.6
WHERE 1 0 int64 - f32 i8 u8 i32 i64 u32 bool: 1.14 2.8
WHILE 1+ 0 - - any: 1.15
ZEROS_LIKE 1 0 data - f32 i32 i64: 1.12
"""
"""By the name of each: reads, data, makes, the rule of steps with the widest type,
types; "+" is for all behind. Then the first TensorFlow with each version of its kernel,
"?" where `runtime_version.cc` has none. A row goes on where a line begins with a space.
"""
KINDS: Mapping[str, Kind] = dict(map(_kind, re.split(r"\n(?! )", _ROWS.strip())))
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
    if x is None or weights is None or bias is None or bias.dtype not in WIDE:
        return None
    of_x, of_weights = (new.get(t, t.quantization) for t in (x, weights))
    if of_x is None or of_weights is None or of_weights.block:
        return None
    scale = np.float32(of_x.scales[0])
    scales = tuple(float(scale * np.float32(s)) for s in of_weights.scales)
    return replace(of_weights, scales=scales, zero_points=(0,) * len(scales), axis=0)


WIDE = ("int32", "int64")
"""Types of biases, sizes and places, which stand beside weights of any type."""


def one_step(tensor: LiteTensor) -> tuple[float, int] | None:
    """Return the scale and zero point of a tensor; None if it has not just one."""
    steps = tensor.quantization
    if steps is None or len(steps.scales) != 1:
        return None
    return steps.scales[0], steps.zero_points[0]


def have_equal_steps(one: LiteTensor, other: LiteTensor) -> bool:
    """Return whether two tensors have the same type, scale and zero point."""
    first, second = one_step(one), one_step(other)
    return (
        first is not None
        and second is not None
        and one.dtype == other.dtype
        and first[1] == second[1]
        # Kernels that rescale nothing allow this: kernels/pooling.cc.
        and abs(first[0] - second[0]) <= 1e-6
    )


_FLOATS = ("float", "bfloat")
CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")
TYPE_CHANGES = frozenset(("CAST", *CONVERSIONS))
NO_NUMBERS = frozenset(("resource", "string", "variant"))
"""Types of tensors that hold no numbers, and no memory of their own in the arena."""


def is_float(dtype: str) -> bool:
    """Return whether a type is one of floats."""
    return dtype.startswith(_FLOATS)


def by_count(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts by word, the largest first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def has_floats(op: LiteOp) -> bool:
    """Return whether an op reads or makes floats; conversions from and to them do."""
    return any(is_float(t.dtype) for t in (*op.reads, *op.outputs))


def precision_of(op: LiteOp) -> str:
    """Return the type that an op computes in, and that of its weights if it is another.

    The type is that of what it computes from and into; a file's names for it are
    "int8", "float32", "int16 with int8 weights", or "float32 with int8 weights
    (hybrid)" where TFLite quantizes the activations while it runs.
    """
    read, made = op.reads, op.outputs
    if op.kind in TYPE_CHANGES and read and made:
        return f"{read[0].dtype} to {made[0].dtype}"
    data = [*(t for t in read if not t.stored_bytes), *made]
    types = [t.dtype for t in data]
    # Floats count first, then what is quantized.
    known = [t for t in types if is_float(t)]
    known += [t.dtype for t in data if t.quantization is not None]
    known += [t for t in types if t not in NO_NUMBERS]
    computing = next(iter((*known, *types)), None)
    constants = [t for t in read if t.stored_bytes and t.dtype not in WIDE]
    constants = [t for t in constants if is_float(t.dtype) or t.quantization]
    largest = max(constants, key=lambda t: t.stored_bytes, default=None)
    weights = None if largest is None else largest.dtype
    if weights is None or computing is None or weights == computing:
        return computing or "none"
    is_hybrid = is_float(computing) and not is_float(weights)
    return f"{computing} with {weights} weights{' (hybrid)' if is_hybrid else ''}"


def computes_in_float(precision: str) -> bool:
    """Return whether a type that `precision_of` returned is of floats."""
    return is_float(precision) and " to " not in precision


def is_quantized(precision: str) -> bool:
    """Return whether a type that `precision_of` returned is of quantized numbers."""
    return precision.startswith(STEPPED) and " to " not in precision


def stored_bytes(file: Contents) -> dict[str, int]:
    """Return the bytes of constants by their type, the largest first."""
    totals: dict[str, int] = {}
    # In the order of the file, the first tensor of a buffer gives its type.
    of_buffers = {id(t.buffer): t for t in reversed([*file.tensors])}
    for tensor in of_buffers.values():
        if tensor.stored_bytes:
            dtype, size = tensor.dtype, tensor.stored_bytes
            totals[dtype] = totals.get(dtype, 0) + size
    return by_count(totals)


_HYBRID = "int8 while it runs"
_INT4, _INT4_TO_FLOAT = "int8 with int4 weights", "float32 with int4 weights"
_TIMES: dict[tuple[str, str], int] = {
    (kind, computes_in): int(times)
    for computes_in, row in {
        "int8": "BATCH_MATMUL 9, RELU 14, RELU6 14, RSQRT 160",
        _INT4: "DEPTHWISE_CONV_2D 14",
        _HYBRID: "DEPTHWISE_CONV_2D 4",
        "int16": "CONV_2D 40, DEPTHWISE_CONV_2D 30, TRANSPOSE_CONV 20, "
        "BATCH_MATMUL 40, AVERAGE_POOL_2D 13, MAX_POOL_2D 11, MEAN 40, RELU 40, "
        "RELU6 15, LOGISTIC 8, LEAKY_RELU 35, TANH 7, SOFTMAX 11, STRIDED_SLICE 17, "
        "RESIZE_BILINEAR 8",
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
_VERSION_ROWS: tuple[tuple[str, Mapping[str, int]], ...] = (
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
_BY_TYPE = {
    kind: versions for kinds, versions in _VERSION_ROWS for kind in kinds.split()
}
"""Versions by the type of an op's data, where it is not 1."""
_FLAT = 4
"""The first kernels took tensors of up to so many dimensions."""


def _rank(op: LiteOp) -> int:
    return max(len(t.shape or ()) for t in op.inputs if t is not None)


def _has_scales(tensor: LiteTensor | None) -> bool:
    """Return whether a tensor has several scales."""
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


def _above_flat(version: int) -> Callable[[LiteOp], int]:
    return lambda op: version if _rank(op) > _FLAT else 1


def _with(version: int, *options: str) -> Callable[[LiteOp], int]:
    return lambda op: version if any(op.options.get(o) for o in options) else 1


_BY_OPTION: Mapping[str, Callable[[LiteOp], int]] = {
    "BROADCAST_TO": lambda op: 2,
    **dict.fromkeys(
        ("BATCH_TO_SPACE_ND", "SPACE_TO_BATCH_ND"),
        lambda op: 3 if _rank(op) != _FLAT else 1,
    ),
    # Convolutions by groups.
    "CONV_2D": lambda op: (
        6 if len({(t.shape or ())[-1] for t in op.reads[:2]}) > 1 else 1
    ),
    "DEPTHWISE_CONV_2D": lambda op: (
        2 if max(op.options.get(f"dilation_{c}_factor", 1) for c in "hw") > 1 else 1
    ),
    "DEQUANTIZE": lambda op: 5 if _has_scales(op.inputs[0]) else 1,
    "DIV": _above_flat(2),
    # Without a bias, or with all dimensions.
    "FULLY_CONNECTED": lambda op: (
        6 if len(op.inputs) == 2 else 5 if op.options.get("keep_num_dims") else 1
    ),
    "GATHER": _with(5, "batch_dims"),
    "MAXIMUM": _above_flat(3),
    "MINIMUM": _above_flat(3),
    "PAD": _above_flat(4),
    "PADV2": _above_flat(4),
    "QUANTIZE": _of_quantize,
    "RESIZE_BILINEAR": _with(3, "half_pixel_centers"),
    "RESIZE_NEAREST_NEIGHBOR": _with(3, "half_pixel_centers", "align_corners"),
    "SLICE": _above_flat(5),
    "STRIDED_SLICE": _of_strided_slice,
    "SUB": _above_flat(3),
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


def runtime_of(ops: Iterable[LiteOp]) -> str:
    """Return the oldest TensorFlow that has the kernels of ops, such as "2.11.0"."""
    found: tuple[int, ...] = (0,)
    for kind, version in {(op.kind, op.version) for op in ops if not op.is_custom}:
        releases = KINDS.get(kind, OTHER).releases
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
    """Update the runtime in the metadata of a file, if they name one."""
    if RUNTIME in file.metadata:
        file.metadata[RUNTIME] = runtime_entry(runtime_of(file.ops))
