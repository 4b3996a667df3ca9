"""TFLite's kernels with activations of 16 bits, by the type of the op.

Measured with TensorFlow 2.21 and LiteRT 2.3: `tests/quantize/test_int16_kernels.py`
runs a file of each op. They are within one step of the simulation, softmax and tanh
within two. Those of EXP, GELU, LOG and RSQRT look values up in a table of 513, and are
up to 80 steps off: these ops are computed in float.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """What a kernel asks of the steps of what it makes."""

    LAYER = "multiplies by weights of 8 bits and adds a bias of 64"
    MAKES = "makes values in steps of their own"
    KEEPS = "makes values in the steps of what it reads"
    JOINS = "reads several tensors in the steps of what it makes"
    FIXED = "makes values in steps of 1/32768"


@dataclass(frozen=True)
class Int16Kernel:
    """A kernel with activations of 16 bits.

    Attributes:
        rule: what it asks of steps.
        version: the version of the kernel that a file asks for at least.
        data: which inputs are data; None for all floats.
    """

    rule: Rule
    version: int
    data: tuple[int, ...] | None = None


INEXACT = frozenset(("EXP", "GELU", "LOG", "RSQRT"))
"""Types of ops whose kernels of 16 bits are far off."""

INT16_KERNELS = {
    "CONV_2D": Int16Kernel(Rule.LAYER, 4, (0,)),
    "DEPTHWISE_CONV_2D": Int16Kernel(Rule.LAYER, 5, (0,)),
    "FULLY_CONNECTED": Int16Kernel(Rule.LAYER, 7, (0,)),
    "TRANSPOSE_CONV": Int16Kernel(Rule.LAYER, 4, (2,)),
    "ADD": Int16Kernel(Rule.MAKES, 4),
    "SUB": Int16Kernel(Rule.MAKES, 5),
    "MUL": Int16Kernel(Rule.MAKES, 5),
    "BATCH_MATMUL": Int16Kernel(Rule.MAKES, 3),
    "LEAKY_RELU": Int16Kernel(Rule.MAKES, 2),
    "RELU": Int16Kernel(Rule.MAKES, 3),
    "MEAN": Int16Kernel(Rule.MAKES, 3, (0,)),
    "SUM": Int16Kernel(Rule.MAKES, 2, (0,)),
    "ABS": Int16Kernel(Rule.MAKES, 5),
    "REDUCE_PROD": Int16Kernel(Rule.MAKES, 1, (0,)),
    "RELU6": Int16Kernel(Rule.MAKES, 1),
    "SQRT": Int16Kernel(Rule.MAKES, 1),
    "LOGISTIC": Int16Kernel(Rule.FIXED, 3),
    "SOFTMAX": Int16Kernel(Rule.FIXED, 3),
    "TANH": Int16Kernel(Rule.FIXED, 3),
    "AVERAGE_POOL_2D": Int16Kernel(Rule.KEEPS, 3),
    "MAX_POOL_2D": Int16Kernel(Rule.KEEPS, 3),
    "BROADCAST_TO": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "GATHER_ND": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "REVERSE_V2": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "SPLIT_V": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "TOPK_V2": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "RESHAPE": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "SQUEEZE": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "EXPAND_DIMS": Int16Kernel(Rule.KEEPS, 1, (0,)),
    "TRANSPOSE": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "PAD": Int16Kernel(Rule.KEEPS, 3, (0,)),
    "MIRROR_PAD": Int16Kernel(Rule.KEEPS, 3, (0,)),
    "SLICE": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "STRIDED_SLICE": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "SPLIT": Int16Kernel(Rule.KEEPS, 4, (1,)),
    "UNPACK": Int16Kernel(Rule.KEEPS, 4),
    "GATHER": Int16Kernel(Rule.KEEPS, 5, (0,)),
    "TILE": Int16Kernel(Rule.KEEPS, 3, (0,)),
    "RESIZE_BILINEAR": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "RESIZE_NEAREST_NEIGHBOR": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "REDUCE_MAX": Int16Kernel(Rule.KEEPS, 3, (0,)),
    "REDUCE_MIN": Int16Kernel(Rule.KEEPS, 3, (0,)),
    "BATCH_TO_SPACE_ND": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "SPACE_TO_BATCH_ND": Int16Kernel(Rule.KEEPS, 4, (0,)),
    "CONCATENATION": Int16Kernel(Rule.JOINS, 3),
    "PACK": Int16Kernel(Rule.JOINS, 4),
    "MAXIMUM": Int16Kernel(Rule.JOINS, 4),
    "MINIMUM": Int16Kernel(Rule.JOINS, 4),
    "SELECT_V2": Int16Kernel(Rule.JOINS, 2, (1, 2)),
    "SELECT": Int16Kernel(Rule.JOINS, 2, (1, 2)),
}
"""By type of op the kernel that computes it."""
