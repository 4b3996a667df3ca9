"""Ops of TFLite files and the ops of graphs that each can compute, by their types."""

from __future__ import annotations

from geutil.graph import op_types
from geutil.graph.types import Operation
from geutil.tflite.parts import FLEX
from geutil.tflite.schema import words

_FORWARDS = frozenset(
    ("Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient")
)
"""Ops that give what they read; FakeQuant ops do so in steps."""
MOVES = frozenset(
    words(
        "BatchToSpaceND Cast ExpandDims MirrorPad Pad PadV2 Reshape SpaceToBatchND "
        "Squeeze StridedSlice TensorListStack Transpose"
    )
)
"""Ops that move values, which a kernel may read otherwise instead."""
LAYOUT = MOVES | {"ConcatV2", "Pack"}
"""The same with those that move the values of several tensors."""
ARITHMETIC = op_types.SHIFTS | op_types.SCALINGS | op_types.FUSED_NORMS
"""Ops that kernels take into weights and biases, where they read a constant."""
APPLIED = {
    "Relu": ("RELU",),
    "Relu6": ("RELU6",),
    "Tanh": ("TANH",),
    "Minimum": ("RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
    "Maximum": ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
}
"""Activations as options of kernels."""
CLIPS = frozenset(APPLIED) - {"Tanh"}
"""Those that the range of integers can be."""
FORMULAS = frozenset(
    words(
        "ELU GELU HARD_SWISH L2_NORMALIZATION LEAKY_RELU LOG_SOFTMAX PRELU SOFTMAX "
        "STABLEHLO_COMPOSITE"
    )
)
"""Ops of files that each stand for a formula of several ops."""
IN_FORMULAS = frozenset(
    words(
        "Abs Erf Erfc Exp Log Max Maximum Mean Minimum Neg Pow Relu Relu6 Rsqrt "
        "Sigmoid Sqrt Square Sum Tanh"
    )
) | (op_types.SHIFTS | op_types.SCALINGS)
"""Ops that such formulas are made of."""
_MATRIX_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_PRODUCTS = {
    "BATCH_MATMUL": _MATRIX_PRODUCTS,
    # Keras calls a compiled function for convolutions by groups.
    "CONV_2D": ("Conv2D", "DepthwiseConv2dNative", *sorted(op_types.CALLS)),
    "CONV_3D": ("Conv3D",),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2dNative", "Conv2D"),
    "FULLY_CONNECTED": (*_MATRIX_PRODUCTS, "Conv2D"),
    "TRANSPOSE_CONV": ("Conv2DBackpropInput",),
}
"""Products that each kernel can compute: one, whatever else it takes in."""
_EVERY_PRODUCT = frozenset(kind for kinds in _PRODUCTS.values() for kind in kinds)
TAKES_CONSTANTS = frozenset((*_PRODUCTS, "ADD", "DIV", "MUL", "SUB"))
"""Kernels with constants that others can be multiplied with, or added to."""
_CALLED = {
    "ADD": ("BiasAdd", "Sub"),
    "ADD_N": ("AddN",),
    "AVERAGE_POOL_2D": ("AvgPool", "Mean"),
    "CONCATENATION": ("ConcatV2",),
    "DIV": ("RealDiv",),
    "GATHER": ("GatherV2", "ResourceGather"),
    "LOGISTIC": ("Sigmoid",),
    "MAX_POOL_2D": ("MaxPool",),
    "MAXIMUM": ("Relu",),
    "MINIMUM": ("Relu6",),
    "MUL": ("Neg", "RealDiv"),
    "REDUCE_ALL": ("All",),
    "REDUCE_ANY": ("Any",),
    "REDUCE_MAX": ("Max",),
    "REDUCE_MIN": ("Min",),
    "REDUCE_PROD": ("Prod",),
    "RELU": ("Maximum",),
    "RELU6": ("Minimum", "Maximum"),
    "RELU_0_TO_1": ("Minimum", "Maximum"),
    "RELU_N1_TO_1": ("Minimum", "Maximum"),
    "RESHAPE": ("ExpandDims", "Squeeze", "StridedSlice", "Transpose"),
    "SELECT": ("SelectV2",),
    "SELECT_V2": ("Select",),
    "SPLIT_V": ("Split",),
    "STRIDED_SLICE": ("Slice",),
    "IF": ("StatelessIf",),
    "WHILE": ("StatelessWhile", "LoopCond"),
}
"""Ops that files call otherwise, by what they call them."""
_WRITTEN_OUT = {
    **dict.fromkeys(op_types.FUSED_NORMS, ("ADD", "MUL", "SUB")),
    "OneHot": ("SELECT_V2",),
    "SquaredDifference": ("MUL", "SQUARE", "SUB"),
    "Einsum": ("BATCH_MATMUL", "FULLY_CONNECTED", "MUL", "RESHAPE", "TRANSPOSE"),
}
"""Ops that files hold as several, and of which types."""
MOVERS = ("RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE")
"""Ops of files that move values, from before which others can come behind."""
CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")
_BOOKKEEPING = ("bool", "int", "uint", "variant", "resource")
"""Types of sizes, indices and lists, which the converter computes or does without."""


def is_step(op: Operation) -> bool:
    """Tell whether an op gives what it reads, as it is or in steps."""
    return op.type in _FORWARDS or op.type in op_types.FAKE_QUANT


def is_bookkeeping(dtype: str) -> bool:
    """Tell whether values of a type are sizes, indices or lists, and no data."""
    return dtype.startswith(_BOOKKEEPING)


def is_product(op: Operation) -> bool:
    """Tell whether an op is a product that a kernel computes whole."""
    return op.type in _EVERY_PRODUCT


def is_written_out(op: Operation) -> bool:
    """Tell whether files can hold an op as several."""
    return op.type in _WRITTEN_OUT


def is_one_of(kind: str, op: Operation) -> bool:
    """Tell whether a type of the file is one of several that an op is written as."""
    return kind in _WRITTEN_OUT.get(op.type, ())


def is_called(kind: str, op: Operation) -> bool:
    """Tell whether an op of a file is called as one of a graph is."""
    own = op.type.replace("_", "").lower()
    theirs = kind.removeprefix(FLEX).replace("_", "").lower()
    return own == theirs or own.rstrip("0123456789").removesuffix("v") == theirs


def can_compute(kind: str, op: Operation) -> bool:
    """Tell whether an op of a file can compute one of a graph."""
    if op.type in op_types.PLACEHOLDERS:
        return False
    if kind in CONVERSIONS:
        return is_step(op) or op.type in CLIPS
    if is_one_of(kind, op):
        return True
    if kind in _PRODUCTS:
        return op.type in _PRODUCTS[kind]
    in_formula = kind in FORMULAS and op.type in IN_FORMULAS
    return op.type in _CALLED.get(kind, ()) or is_called(kind, op) or in_formula
