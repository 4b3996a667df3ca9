"""TFLite's int8 kernels.

The ranges that they require, by the type of the TensorFlow op.

Measured with TensorFlow 2.21: an op between FakeQuant ops is converted, and stays
int8 or not. `tests/quantize/test_kernels.py` measures it again. The kernels that older
releases do not have are left out where one of these runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import tensorflow as tf

from geutil.graph import op_types
from geutil.graph.op_types import types_in
from geutil.graph.types import Operation


class Treatment(Enum):
    """The relation of an op's range to those of its inputs."""

    PASSES = "forwards values, and with them their range"
    KEEPS = "makes values between those it reads, in the same range"
    JOINS = "forwards values of several tensors, in one range"
    MAKES = "makes values of another range"
    FIXED = "makes values of a range that is known"


@dataclass(frozen=True)
class Kernel:
    """How the int8 kernel for a type of op works."""

    treatment: Treatment  # what it does to ranges
    inputs: tuple[int, ...] | None = (0,)  # which inputs are data; None for all
    range: tuple[float, float] | None = None  # the range that the kernel has built in
    fuses: bool = False  # whether a Relu behind it becomes part of it
    slot: str = "act_quant"  # what the FakeQuant op behind it is called
    activation: str = ""  # whether it is an activation function, by its name

    def data_inputs(self, op: Operation) -> list[int]:
        """Return the indices of the inputs that need a range."""
        if self.inputs is None:
            return list(range(len(op.inputs)))
        return [i for i in self.inputs if i < len(op.inputs)]


def _making(slot: str, *, fuses: bool = False) -> Kernel:
    return Kernel(Treatment.MAKES, None, fuses=fuses, slot=slot)


def _activation(name: str) -> Kernel:
    return Kernel(Treatment.MAKES, activation=name)


def _fixed(name: str, low: float, high: float) -> Kernel:
    # A slot of its own: no variable is named after it, and the layer before it may well
    # be in the same scope.
    slot = f"{name}_quant"
    return Kernel(Treatment.FIXED, range=(low, high), slot=slot, activation=name)


_REDUCING = Kernel(Treatment.MAKES, (0,), slot="reduce_quant")
KEEPING = Kernel(Treatment.KEEPS, (0,), slot="keep_quant")
_POOLING = Kernel(Treatment.KEEPS, (0,), slot="pool_quant")

FUSED_ACTIVATIONS = {"Relu": "relu", "Relu6": "relu6"}
"""Activations that become part of the kernel before them, where that can."""

Version = tuple[int, int]

SINCE: dict[str, Version] = {"BroadcastTo": (2, 20), "Sqrt": (2, 21)}
"""The first TensorFlow with an int8 kernel, where not every supported one has it."""


def without_kernel(kind: str) -> str:
    """Return why an op that no kernel computes in int8 stays float."""
    reason = f"TFLite has no int8 kernel for {kind}"
    if kind not in SINCE or SINCE[kind] <= version_of(tf.__version__):
        return reason
    first = ".".join(map(str, SINCE[kind]))
    return f"{reason} before TensorFlow {first}, and this is {tf.__version__}"


def version_of(name: str) -> Version:
    """Return the major and the minor number of a version."""
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


_MOVING_FIRST = ("PadV2", "ReverseV2", "SplitV", "TopKV2", "Unpack")
MOVING = frozenset((*_MOVING_FIRST, "Split"))
"""Types of ops that forward values, and whose results have to be quantized all the
same."""

_FORWARDING = types_in(
    """
    BatchToSpaceND BroadcastTo DepthToSpace EnsureShape ExpandDims Gather GatherNd
    GatherV2 Identity Max MaxPool Min MirrorPad Pad PlaceholderWithDefault
    PreventGradient Reshape ResizeNearestNeighbor Roll Slice Snapshot SpaceToBatchND
    SpaceToDepth Squeeze StopGradient StridedSlice Tile Transpose
    """
)
_NEWEST: dict[str, Kernel] = {
    **dict.fromkeys(sorted(_FORWARDING), Kernel(Treatment.PASSES)),
    "IdentityN": Kernel(Treatment.PASSES, None),
    # They pass ranges on, but the converter wants to see them at the end of a model.
    **dict.fromkeys(_MOVING_FIRST, KEEPING),
    "Split": Kernel(Treatment.KEEPS, (1,), slot="keep_quant"),
    "AvgPool": _POOLING,
    "ResizeBilinear": KEEPING,
    "ConcatV2": Kernel(Treatment.JOINS, None, slot="concat_quant"),
    "Pack": Kernel(Treatment.JOINS, None, slot="concat_quant"),
    "SelectV2": Kernel(Treatment.JOINS, (1, 2), slot="select_quant"),
    "Select": Kernel(Treatment.JOINS, (1, 2), slot="select_quant"),
    "Maximum": Kernel(Treatment.JOINS, (0, 1), slot="maximum_quant"),
    "Minimum": Kernel(Treatment.JOINS, (0, 1), slot="minimum_quant"),
    "Add": _making("add_quant", fuses=True),
    "AddV2": _making("add_quant", fuses=True),
    "BiasAdd": _making("add_quant", fuses=True),
    "Sub": _making("sub_quant", fuses=True),
    "Mul": _making("mul_quant", fuses=True),
    "RealDiv": _making("div_quant"),
    "SquaredDifference": _making("difference_quant"),
    "BatchMatMul": _making("product_quant"),
    "BatchMatMulV2": _making("product_quant"),
    "BatchMatMulV3": _making("product_quant"),
    "MatMul": _making("product_quant"),
    "Einsum": _making("product_quant"),
    "Mean": _REDUCING,
    "Prod": _REDUCING,
    "Sum": _REDUCING,
    "Abs": _making("abs_quant"),
    "Exp": _making("exp_quant"),
    "Log": _making("log_quant"),
    "Rsqrt": _making("rsqrt_quant"),
    "Sqrt": _making("sqrt_quant"),
    "Relu": _activation("relu"),
    "Relu6": _activation("relu6"),
    "LeakyRelu": _activation("leaky_relu"),
    # The ends of these leave out the one value that eight bits cannot store.
    "Sigmoid": _fixed("sigmoid", 0.0, 255 / 256),
    "Softmax": _fixed("softmax", 0.0, 255 / 256),
    "Tanh": _fixed("tanh", -1.0, 127 / 128),
    "LogSoftmax": _fixed("log_softmax", -255 / 16, 0.0),
}


def kernels_of(version: Version) -> dict[str, Kernel]:
    """Return the kernels of a TensorFlow, by the types of ops."""
    kernel_by_type = {
        kind: kernel
        for kind, kernel in _NEWEST.items()
        if kind not in SINCE or SINCE[kind] <= version
    }
    if (2, 20) <= version < (2, 21):
        # Its converter wants to see what a BroadcastTo makes quantized, too.
        kernel_by_type["BroadcastTo"] = KEEPING
    return kernel_by_type


KERNELS = kernels_of(version_of(tf.__version__))
"""The kernels of the TensorFlow that runs."""


PASSING = frozenset(
    kind for kind, kernel in _NEWEST.items() if kernel.treatment is Treatment.PASSES
)
"""Types of ops that forward values, in int8 or not."""

COMPOSITES = ("hard_swish", "gelu", "prelu")
"""Activations that are several ops, which one kernel computes."""

ACTIVATIONS = frozenset(
    (*(k.activation for k in KERNELS.values() if k.activation), *COMPOSITES, "silu")
)
"""The names of the activations that can be quantized."""

CONVOLUTIONS = frozenset(("Conv2D", "DepthwiseConv2dNative", "Conv2DBackpropInput"))
FLOAT_LAYERS = frozenset(("Conv3D", "Conv3DBackpropInputV2"))
"""Types of layers that TFLite computes in float only."""
PRODUCTS = frozenset(
    ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
)


DIVISIONS = {"Inv": 0, "RealDiv": 1, "Reciprocal": 0}
"""Types of ops that divide, and which of their inputs is the divisor."""
COMPARISONS = frozenset(
    ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
)
DECISIONS = COMPARISONS | {"ArgMax", "ArgMin"}
"""Types of ops that read values, and whose results are no values."""

TESTS = frozenset(("IsFinite", "IsInf", "IsNan"))
"""Types of ops that ask what values are, which the converter computes in float."""

FAKE_QUANT = op_types.FAKE_QUANT

REFUSED = types_in(
    """
    Acos Acosh AdjustContrastv2 AdjustHue AdjustSaturation Angle ApproximateEqual
    Asin Asinh Atan Atanh AvgPool3D BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr
    Cholesky Complex Conj Cosh CropAndResize Cross Cumprod CumulativeLogsumexp
    DenseBincount Diag DiagPart Digamma Dilation2D DynamicPartition Erf Erfc Erfinv
    ExtractImagePatches FFT FFT2D HSVToRGB HistogramFixedWidth IFFT IFFT2D IRFFT
    IRFFT2D Igamma ImageProjectiveTransformV3 InTopKV2 Invert LeftShift
    LogMatrixDeterminant LowerBound Lu MatrixDeterminant MatrixDiagPartV3
    MatrixInverse MatrixSolve MatrixTriangularSolve MaxPool3D MaxPoolWithArgmax Mod
    Ndtri NthElement Polygamma Qr RFFT3D RGBToHSV RandomGamma RandomShuffle
    RandomUniformInt ResizeArea ResizeBicubic ScaleAndTranslate SegmentMax
    SegmentMean SegmentProd SelfAdjointEigV2 Sinh StatelessRandomNormalV2
    StatelessRandomUniformV2 Svd Tan TensorScatterMax TensorScatterMin
    TensorScatterSub TruncateMod TruncatedNormal UniqueV2 UniqueWithCounts
    UpperBound Zeta
    """
)
"""Types of ops that the converter refuses, and for which `lowering` has no form.

Measured with TensorFlow 2.21; `tests/quantize/test_kernels.py` measures it again.
"""
