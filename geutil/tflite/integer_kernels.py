"""Kernels of TFLite that compute in integers, by the kind of the op and the width.

Measured with TensorFlow 2.21 and LiteRT 2.3: `tests/quantize/test_kernels.py` and
`test_int16_kernels.py` run a file of each op. Kernels of int16 are within one step of
the simulation, softmax and tanh within two. Those of EXP, GELU, LOG and RSQRT look
values up in a table of 513, and are up to 80 steps off: `INEXACT`.

The steps that kernels have built in, and the places of weights and biases, are in
`geutil.tflite.steps`; the versions of ops in `geutil.tflite.versions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class StepRule(Enum):
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
        types: the types of activations that it computes in.
        data: the inputs that are data; None for all floats.
        selects: whether each of its values is one of its data, so that data can be cut
            off at the ends of the result's range without changing a result.
    """

    rule: StepRule
    types: tuple[str, ...]
    data: tuple[int, ...] | None = None
    selects: bool = False


_INT8, _BOTH = ("int8",), ("int8", "int16")


def _kinds(kinds: str, kernel: IntegerKernel) -> dict[str, IntegerKernel]:
    return dict.fromkeys(kinds.split(), kernel)


INEXACT = frozenset(("EXP", "GELU", "LOG", "RSQRT"))
"""Kinds of ops whose kernels of int16 are far off, and are not used."""

INTEGER_KERNELS: Mapping[str, IntegerKernel] = {
    **_kinds(
        "CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED",
        IntegerKernel(StepRule.LAYER, _BOTH, (0,)),
    ),
    **_kinds("TRANSPOSE_CONV", IntegerKernel(StepRule.LAYER, _BOTH, (2,))),
    **_kinds(
        "ABS ADD BATCH_MATMUL LEAKY_RELU MUL RELU RELU6 SQRT SUB",
        IntegerKernel(StepRule.MAKES, _BOTH),
    ),
    **_kinds("MEAN REDUCE_PROD SUM", IntegerKernel(StepRule.MAKES, _BOTH, (0,))),
    **_kinds(
        "EXP GELU HARD_SWISH LOG PRELU RELU_0_TO_1 RELU_N1_TO_1 RSQRT "
        "SQUARED_DIFFERENCE",
        IntegerKernel(StepRule.MAKES, _INT8),
    ),
    **_kinds("LOGISTIC SOFTMAX TANH", IntegerKernel(StepRule.FIXED, _BOTH)),
    **_kinds("L2_NORMALIZATION LOG_SOFTMAX", IntegerKernel(StepRule.FIXED, _INT8)),
    **_kinds(
        "AVERAGE_POOL_2D RESIZE_BILINEAR", IntegerKernel(StepRule.KEEPS, _BOTH, (0,))
    ),
    **_kinds(
        "BATCH_TO_SPACE_ND BROADCAST_TO EXPAND_DIMS GATHER GATHER_ND MAX_POOL_2D "
        "MIRROR_PAD PAD REDUCE_MAX REDUCE_MIN RESHAPE RESIZE_NEAREST_NEIGHBOR "
        "REVERSE_V2 SLICE SPACE_TO_BATCH_ND SPLIT_V SQUEEZE STRIDED_SLICE TILE TOPK_V2 "
        "TRANSPOSE UNPACK",
        IntegerKernel(StepRule.KEEPS, _BOTH, (0,), selects=True),
    ),
    **_kinds("SPLIT", IntegerKernel(StepRule.KEEPS, _BOTH, (1,), selects=True)),
    **_kinds(
        "DEPTH_TO_SPACE SPACE_TO_DEPTH",
        IntegerKernel(StepRule.KEEPS, _INT8, (0,), selects=True),
    ),
    **_kinds("PADV2", IntegerKernel(StepRule.KEEPS, _INT8, (0, 2), selects=True)),
    **_kinds(
        "CONCATENATION MAXIMUM MINIMUM PACK", IntegerKernel(StepRule.JOINS, _BOTH)
    ),
    **_kinds("FILL", IntegerKernel(StepRule.JOINS, _BOTH, (1,))),
    **_kinds("SELECT SELECT_V2", IntegerKernel(StepRule.JOINS, _BOTH, (1, 2))),
    **_kinds("ARG_MAX ARG_MIN", IntegerKernel(StepRule.READS, _INT8, (0,))),
    **_kinds(
        "EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL",
        IntegerKernel(StepRule.READS, _INT8),
    ),
    **_kinds("RANK SHAPE", IntegerKernel(StepRule.READS, _BOTH)),
}
"""By the kind of the op, the kernel that computes it in integers."""
