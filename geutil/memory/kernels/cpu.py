"""Buffers of TensorFlow's CPU kernels, by op type: results in place, ops run at once.

Read off the allocation records and tensor addresses of traced Sessions (TensorFlow
2.21, oneDNN on). A type that is in no table makes new buffers for all of its outputs
and hands work to a thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.op_types import MERGES, SWITCHES
from geutil.graph.types import Operation, dims_of

Pairs = Sequence[tuple[int, int]]
"""Pairs of places, of an output and of an input."""


def types_in(names: str) -> frozenset[str]:
    """Return the types of ops that a text names."""
    return frozenset(names.split())


_FIRST: Pairs = ((0, 0),)
_NONE: Pairs = ()

HELD = types_in(
    """
    Const Placeholder PlaceholderV2 ReadVariableOp VarHandleOp Variable VariableV2 _Arg
    """
)
"""Their outputs are held anyway: by the graph, the caller or a variable."""
ONLY_ON_GPUS = frozenset((("FusedBatchNormV3", 5), ("_FusedBatchNormEx", 5)))
"""Outputs, by type and place, that hold nothing on a CPU; their rank is not known."""

# The output is the input, whatever its size.
_SAME = types_in(
    """
    Assign AssignAdd AssignSub Bitcast CheckNumerics DestroyTemporaryVariable
    EnsureShape Enter Exit ExpandDims Identity LoopCond NextIteration
    PlaceholderWithDefault PreventGradient RefEnter RefExit RefIdentity RefNextIteration
    Reshape Snapshot Squeeze StopGradient
    """
)
# The output is the input where nothing is to be done: no element more or less.
_SAME_IF_AS_LARGE = types_in(
    """
    BroadcastTo Max Mean Min Pad PadV2 Prod Slice StridedSlice Sum Tile
    """
)
# The output is the input if there are so many inputs.
_SINGLE = {"ConcatV2": 2, "Pack": 1, "AddN": 1}
# An output that takes rows of the first dimension is a part of the input's buffer.
_ROWS = frozenset(("Slice", "Split", "SplitV", "StridedSlice", "Unpack"))
_ROW_ALIGNMENT = 64

_UNARY = types_in(
    """
    Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e BiasAdd Ceil Conj Cos Cosh
    Digamma Elu Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxVars Floor Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log
    Log1p LogSoftmax LogicalNot MatrixBandPart Ndtri Neg OnesLike
    QuantizeAndDequantizeV2 Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign
    Sin Sinh Softmax Softplus Softsign Sqrt Square Tan Tanh TensorScatterAdd
    TensorScatterUpdate ZerosLike _MklSwish _UnaryOpsComposition
    """
)
_BINARY = types_in(
    """
    Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan EluGrad Equal
    FloorDiv FloorMod Greater GreaterEqual InvGrad LeakyReluGrad LeftShift Less
    LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter NotEqual
    Pow RealDiv ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad SeluGrad
    SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub TanhGrad
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    """
)
_OTHER_REUSES: dict[str, Pairs] = {
    "Select": ((0, 1), (0, 2)),
    "SelectV2": ((0, 1), (0, 2)),
    "SoftmaxCrossEntropyWithLogits": ((1, 0),),
    "SparseSoftmaxCrossEntropyWithLogits": ((1, 0),),
}

_UPDATES = frozenset(("AssignAddVariableOp", "AssignSubVariableOp"))

# Run at once, on the thread that made them ready: IsExpensive() is false.
CHEAP = types_in(
    """
    Bitcast Const ControlTrigger EnsureShape Enter Exit ExpandDims Identity IdentityN
    LoopCond Merge NextIteration NoOp Placeholder PlaceholderWithDefault
    PreventGradient Rank RefEnter RefExit RefIdentity RefMerge RefNextIteration
    RefSwitch Reshape Shape ShapeN Size Squeeze StopGradient Switch _Arg _Retval
    """
)

# Rewritten for oneDNN after Grappler, so they come after all others in the order.
ONEDNN = types_in(
    """
    AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BatchMatMul BatchMatMulV2 Conv2D
    Conv2DBackpropFilter Conv2DBackpropFilterWithBias Conv2DBackpropInput Conv3D
    Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum
    FusedBatchNorm FusedBatchNormGrad
    FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 LRN
    LRNGrad MatMul MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad Softmax _FusedConv2D
    _FusedDepthwiseConv2dNative _FusedMatMul _MklLayerNorm _MklSwish
    """
)


def aliases(op: Operation) -> Pairs:
    """Return which outputs of an op are the buffer of which input."""
    kind = op.type
    if kind in _SAME or kind in MERGES:
        return _FIRST
    if kind == "IdentityN":
        return [(i, i) for i in range(len(op.outputs))]
    if kind in SWITCHES:
        return ((0, 0), (1, 0))
    if kind in _SAME_IF_AS_LARGE and _as_large(op):
        return _FIRST
    if kind in _ROWS:
        return _rows(op)
    return _FIRST if _SINGLE.get(kind) == len(op.inputs) else _NONE


def reuses(op: Operation) -> Pairs:
    """Return which outputs of an op can take over the buffer of which input."""
    kind = op.type
    if kind in _UNARY:
        return _FIRST
    if kind in _BINARY:
        return ((0, 0), (0, 1))
    if kind == "AddN":
        return [(0, i) for i in range(len(op.inputs))]
    return _OTHER_REUSES.get(kind, _NONE)


def passes_on(op_type: str) -> bool:
    """Tell whether an op of a type yields its first input itself, whatever it is."""
    return op_type in _SAME


def is_held(op: Operation) -> bool:
    """Tell whether the outputs of an op are held anyway.

    TensorFlow makes a constant of a `Fill` of constants (2.21: of any size with
    Grappler, of up to 10 MiB without).
    """
    if op.type != "Fill":
        return op.type in HELD
    are_constant = all(t.op.type in ("Const", "Shape") for t in op.inputs)
    is_known = op.outputs[0].shape.is_fully_defined()
    return are_constant and is_known and not op.control_inputs


def updates_variable(op_type: str) -> bool:
    """Tell whether an op of a type changes the variable of its first input where it is.

    While somebody still holds the value that was read, it does so in a new buffer.
    """
    return op_type in _UPDATES or op_type.startswith("ResourceApply")


def _as_large(op: Operation) -> bool:
    elements = op.inputs[0].shape.num_elements()
    return elements is not None and elements == op.outputs[0].shape.num_elements()


def _rows(op: Operation) -> Pairs:
    """Return (output, input) for outputs that are rows in the buffer of the input."""
    place = 1 if op.type == "Split" else 0
    whole = dims_of(op.inputs[place])
    if not whole or None in whole or not _rows_are_aligned(op, whole):
        return _NONE
    if op.type == "Unpack" and op.get_attr("axis") != 0:
        return _NONE
    one = op.type == "Unpack" or (
        op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1
    )
    pairs = []
    for i, output in enumerate(op.outputs):
        part = dims_of(output)
        if part is not None and (part if one else part[1:]) == whole[1:]:
            pairs.append((i, place))
    return pairs


def _rows_are_aligned(op: Operation, whole: Sequence[int | None]) -> bool:
    """Tell whether rows lie where Eigen wants memory; kernels copy others.

    Kernels look at the bytes of one row, and in a vector at where a slice begins and
    ends. What takes every other row, or rows backwards, is copied.
    """
    size = op.outputs[0].dtype.size
    if op.type == "StridedSlice":
        strides = tf.get_static_value(op.inputs[3])
        if strides is None or any(stride != 1 for stride in strides):
            return False
    if len(whole) > 1:
        return math.prod(n or 0 for n in whole[1:]) * size % _ROW_ALIGNMENT == 0
    if op.type not in ("Slice", "StridedSlice"):
        return False
    ends = [tf.get_static_value(tensor) for tensor in op.inputs[1:3]]
    if op.type == "StridedSlice" and op.get_attr("end_mask") == 1:
        ends[1] = whole
    length = whole[0] or 0
    static_ends = [end[0] for end in ends if end is not None]
    places = [n + length if n < 0 else n for n in static_ends]
    return len(places) == 2 and all(n * size % _ROW_ALIGNMENT == 0 for n in places)
