"""Kernels of TFLite that compute in integers, by the kind of the op and the width.

Measured with TensorFlow 2.21 and LiteRT 2.3: `tests/quantize/test_kernels.py` and
`test_int16_kernels.py` run a file of each op. Kernels of int16 are within one step of
the simulation, softmax and tanh within two. Those of EXP, GELU, LOG and RSQRT look
values up in a table of 513, and are up to 80 steps off: `INEXACT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Rule(Enum):
    """The steps that a kernel asks for of the values that it makes."""

    LAYER = "multiplies by weights of 8 bits and adds a bias"
    MAKES = "makes values in steps of their own"
    KEEPS = "makes values in the steps of its data"
    JOINS = "reads several tensors in the steps of its result"
    FIXED = "makes values in steps that it has built in"
    READS = "makes no values, but indices, truth values or sizes"


@dataclass(frozen=True)
class IntegerKernel:
    """The kernel of a kind of ops.

    Attributes:
        rule: the steps that it asks for.
        versions: by the types of activations that it computes in, the versions of the
            op that it needs at least.
        data: the inputs that are data; None for all floats.
        weights: the input that holds the weights of a layer.
        bias: the input that holds its bias.
        fixed: by type, the scale and the zero point that it has built in.
        selects: whether each of its values is one of its data, so that data can be cut
            off at the ends of the result's range without changing a result.
    """

    rule: Rule
    versions: Mapping[str, int] = field(default_factory=dict)
    data: tuple[int, ...] | None = None
    weights: int = -1
    bias: int = -1
    fixed: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    selects: bool = False


def _versions(int8: int, int16: int) -> dict[str, int]:
    """Return versions by type; 0 stands for no kernel."""
    return {t: v for t, v in (("int8", int8), ("int16", int16)) if v}


def _layer(
    int8: int, int16: int, data: int = 0, weights: int = 1, bias: int = 2
) -> IntegerKernel:
    return IntegerKernel(Rule.LAYER, _versions(int8, int16), (data,), weights, bias)


def _makes(int8: int, int16: int, data: tuple[int, ...] | None = None) -> IntegerKernel:
    return IntegerKernel(Rule.MAKES, _versions(int8, int16), data)


def _keeps(int8: int, int16: int, data: tuple[int, ...] | None = (0,)) -> IntegerKernel:
    return IntegerKernel(Rule.KEEPS, _versions(int8, int16), data, selects=True)


def _mixes(int8: int, int16: int) -> IntegerKernel:
    """Return a kernel that computes means of its data."""
    return IntegerKernel(Rule.KEEPS, _versions(int8, int16), (0,))


def _joins(int8: int, int16: int, data: tuple[int, ...] | None = None) -> IntegerKernel:
    return IntegerKernel(Rule.JOINS, _versions(int8, int16), data)


def _fixed(int8: int, int16: int, scale: float, zero_point: int) -> IntegerKernel:
    ends = {"int8": (scale, zero_point), "int16": (2.0**-15, 0)}
    return IntegerKernel(Rule.FIXED, _versions(int8, int16), fixed=ends)


def _reads(
    int8: int, int16: int = 0, data: tuple[int, ...] | None = None
) -> IntegerKernel:
    return IntegerKernel(Rule.READS, _versions(int8, int16), data)


INEXACT = frozenset(("EXP", "GELU", "LOG", "RSQRT"))
"""Kinds of ops whose kernels of int16 are far off, and are not used."""

INTEGER_KERNELS: Mapping[str, IntegerKernel] = {
    "CONV_2D": _layer(3, 4),
    "DEPTHWISE_CONV_2D": _layer(3, 5),
    "FULLY_CONNECTED": _layer(4, 7),
    "TRANSPOSE_CONV": _layer(3, 4, data=2, weights=1, bias=3),
    "ABS": _makes(2, 5),
    "ADD": _makes(2, 4),
    "BATCH_MATMUL": _makes(2, 3),
    "EXP": _makes(2, 0),
    "GELU": _makes(2, 0),
    "HARD_SWISH": _makes(1, 0),
    "LEAKY_RELU": _makes(2, 2),
    "LOG": _makes(2, 0),
    "MEAN": _makes(2, 3, (0,)),
    "MUL": _makes(2, 5),
    "PRELU": _makes(1, 0),
    "REDUCE_PROD": _makes(2, 1, (0,)),
    "RELU": _makes(2, 3),
    "RELU6": _makes(2, 1),
    "RELU_0_TO_1": _makes(1, 0),
    "RELU_N1_TO_1": _makes(2, 0),
    "RSQRT": _makes(2, 0),
    "SQRT": _makes(1, 1),
    "SQUARED_DIFFERENCE": _makes(2, 0),
    "SUB": _makes(2, 5),
    "SUM": _makes(2, 2, (0,)),
    "L2_NORMALIZATION": _fixed(2, 0, 2.0**-7, 0),
    "LOGISTIC": _fixed(2, 3, 2.0**-8, -128),
    "LOG_SOFTMAX": _fixed(2, 0, 2.0**-4, 127),
    "SOFTMAX": _fixed(2, 3, 2.0**-8, -128),
    "TANH": _fixed(2, 3, 2.0**-7, 0),
    "AVERAGE_POOL_2D": _mixes(2, 3),
    "RESIZE_BILINEAR": _mixes(2, 4),
    "BATCH_TO_SPACE_ND": _keeps(2, 4),
    "BROADCAST_TO": _keeps(2, 1),
    "DEPTH_TO_SPACE": _keeps(2, 0),
    "EXPAND_DIMS": _keeps(1, 1),
    "GATHER": _keeps(2, 5),
    "GATHER_ND": _keeps(1, 1),
    "MAX_POOL_2D": _keeps(2, 3),
    "MIRROR_PAD": _keeps(2, 3),
    "PAD": _keeps(2, 3),
    "PADV2": _keeps(2, 0, (0, 2)),
    "REDUCE_MAX": _keeps(2, 3),
    "REDUCE_MIN": _keeps(2, 3),
    "RESHAPE": _keeps(1, 1),
    "RESIZE_NEAREST_NEIGHBOR": _keeps(2, 4),
    "REVERSE_V2": _keeps(1, 1),
    "SLICE": _keeps(2, 4),
    "SPACE_TO_BATCH_ND": _keeps(2, 4),
    "SPACE_TO_DEPTH": _keeps(2, 0),
    "SPLIT": _keeps(2, 4, (1,)),
    "SPLIT_V": _keeps(2, 1),
    "SQUEEZE": _keeps(1, 1),
    "STRIDED_SLICE": _keeps(2, 4),
    "TILE": _keeps(1, 3),
    "TOPK_V2": _keeps(2, 1),
    "TRANSPOSE": _keeps(2, 4),
    "UNPACK": _keeps(2, 4),
    "CONCATENATION": _joins(2, 3, None),
    "FILL": _joins(3, 3, (1,)),
    "MAXIMUM": _joins(2, 4),
    "MINIMUM": _joins(2, 4),
    "PACK": _joins(2, 4, None),
    "SELECT": _joins(1, 2, (1, 2)),
    "SELECT_V2": _joins(1, 2, (1, 2)),
    "ARG_MAX": _reads(2, data=(0,)),
    "ARG_MIN": _reads(2, data=(0,)),
    "EQUAL": _reads(2),
    "GREATER": _reads(2),
    "GREATER_EQUAL": _reads(2),
    "LESS": _reads(2),
    "LESS_EQUAL": _reads(2),
    "NOT_EQUAL": _reads(2),
    "RANK": _reads(1, 1),
    "SHAPE": _reads(1, 1),
}
"""By the kind of the op, the kernel that computes it in integers."""
