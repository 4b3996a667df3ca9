"""What TensorFlow's CPU kernels do with buffers, by op type.

Read off the allocation records and tensor addresses of traced Sessions (TensorFlow
2.21, oneDNN on). A type that is in no table makes new buffers for all of its outputs
and hands work to a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from geutil.graph.kinds import Operation
from geutil.memory.sizes import dims_of

Pairs = Sequence[tuple[int, int]]
"""Pairs of places, of an output and of an input."""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


_FIRST: Pairs = ((0, 0),)
_NONE: Pairs = ()

HELD = frozenset(
    (
        "Const",
        "Placeholder",
        "PlaceholderV2",
        "ReadVariableOp",
        "VarHandleOp",
        "Variable",
        "VariableV2",
        "_Arg",
    )
)
"""Their outputs are held anyway: by the graph, the caller or a variable."""

# The output is the input, whatever its size.
_SAME = frozenset(
    (
        "Assign",
        "AssignAdd",
        "AssignSub",
        "Bitcast",
        "CheckNumerics",
        "DestroyTemporaryVariable",
        "EnsureShape",
        "Enter",
        "Exit",
        "ExpandDims",
        "Identity",
        "LoopCond",
        "NextIteration",
        "PlaceholderWithDefault",
        "PreventGradient",
        "RefEnter",
        "RefExit",
        "RefIdentity",
        "RefNextIteration",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
    )
)
# The output is the input where nothing is to be done: no element more or less.
_SAME_IF_AS_LARGE = frozenset(
    (
        "BroadcastTo",
        "Max",
        "Mean",
        "Min",
        "Pad",
        "PadV2",
        "Prod",
        "Slice",
        "StridedSlice",
        "Sum",
        "Tile",
    )
)
# An output that takes rows of the first dimension is a part of the input's buffer.
_ROWS = frozenset(("Slice", "Split", "SplitV", "StridedSlice", "Unpack"))
_ROW_ALIGNMENT = 64

_UNARY = _types(
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
_BINARY = _types(
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
CHEAP = _types(
    """
    Bitcast Const ControlTrigger EnsureShape Enter Exit ExpandDims Identity IdentityN
    LoopCond Merge NextIteration NoOp Placeholder PlaceholderWithDefault
    PreventGradient Rank RefEnter RefExit RefIdentity RefMerge RefNextIteration
    RefSwitch Reshape Shape ShapeN Size Squeeze StopGradient Switch _Arg _Retval
    """
)

# Rewritten for oneDNN after Grappler, so they come after all others in the order.
ONEDNN = _types(
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
    if kind in _SAME:
        return _FIRST
    if kind in ("IdentityN", "RefSwitch", "Switch", "Merge", "RefMerge"):
        return _alias_all(op)
    if kind in _SAME_IF_AS_LARGE and _as_large(op):
        return _FIRST
    if kind in _ROWS:
        return _rows(op)
    if kind in ("ConcatV2", "Pack", "AddN") and _one_input(op):
        return _FIRST
    return _NONE


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


def updates_variable(op_type: str) -> bool:
    """Tell whether an op of a type changes the variable of its first input where it is.

    While somebody still holds what was read of the variable, it does so in a new
    buffer.
    """
    return op_type in _UPDATES or op_type.startswith("ResourceApply")


def _alias_all(op: Operation) -> Pairs:
    if op.type == "IdentityN":
        return [(i, i) for i in range(len(op.outputs))]
    if op.type in ("Switch", "RefSwitch"):
        return ((0, 0), (1, 0))
    return _FIRST


def _one_input(op: Operation) -> bool:
    return len(op.inputs) == (2 if op.type == "ConcatV2" else 1)


def _as_large(op: Operation) -> bool:
    elements = op.inputs[0].shape.num_elements()
    return elements is not None and elements == op.outputs[0].shape.num_elements()


def _rows(op: Operation) -> Pairs:
    place = 1 if op.type == "Split" else 0
    whole = dims_of(op.inputs[place])
    if not whole or None in whole:
        return _NONE
    pairs = []
    for i, output in enumerate(op.outputs):
        part = dims_of(output)
        rest = part if op.type == "Unpack" else (part or ())[1:]
        if op.type == "Unpack" and op.get_attr("axis") != 0:
            continue
        row = output.shape.num_elements()
        if rest != whole[1:] or row is None:
            continue
        if row * output.dtype.size % _ROW_ALIGNMENT == 0:
            pairs.append((i, place))
    return pairs
