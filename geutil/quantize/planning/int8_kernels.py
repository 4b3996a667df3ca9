"""TFLite's int8 kernels.

The ranges that they ask for, by the type of the TensorFlow op.

Measured with TensorFlow 2.21: an op between FakeQuant ops is converted, and stays
int8 or not. `tests/quantize/test_kernels.py` measures it again. The kernels that older
releases do not have are left out where one of these runs.

SpaceToBatch hands on every n-th row and column as an image of its own, an ordinary
convolution follows, and BatchToSpace puts the rows and columns back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import tensorflow as tf

from geutil.graph.op_types import CONVOLUTIONS_2D
from geutil.graph.types import Operation, Tensor
from geutil.select.networks.layers import data_format
from geutil.transform.rewrite.liveness import Liveness


@dataclass(frozen=True, eq=False)
class Moved:
    """A convolution between two moves, which only such read the inside of.

    Attributes:
        spread: the SpaceToBatchND before it.
        convolution: the convolution.
        gathered: the BatchToSpaceND behind it.
        axis: the axis of size 1 that a convolution along one axis is given in between;
            None for two.
    """

    spread: Operation
    convolution: Operation
    gathered: Operation
    axis: int | None

    @property
    def numbers(self) -> list[Tensor]:
        """Blocks and paddings of the first move, then blocks and crops of the last."""
        return [*list(self.spread.inputs)[1:], *list(self.gathered.inputs)[1:]]


def find_moved(ops: Iterable[Operation], live: Liveness) -> Iterator[Moved]:
    """Yield the convolutions between moves that can be written as dilated ones.

    Args:
        ops: the ops to look at.
        live: tells who reads what.

    Cost: linear in ops.
    """
    for op in ops:
        if op.type == "SpaceToBatchND" and not live.is_retired(op):
            # Folded for training, a layer runs twice on what is spread once.
            found = [_moved_behind(op, reader, live) for reader in live.readers(op)]
            moved = [m for m in found if m is not None and not _crops_data(m)]
            if len(moved) == len(found):
                yield from moved


def _moved_behind(spread: Operation, reader: Operation, live: Liveness) -> Moved | None:
    middle, axis = reader, None
    if middle.type == "ExpandDims":
        axis = _positive(tf.get_static_value(middle.inputs[1]))
        middle = _only_reader(middle, live) if axis in (1, 2) else None
    if middle is None or not _is_plain(middle):
        return None
    end = _only_reader(middle, live)
    if end is not None and axis is not None:
        removed = end.get_attr("squeeze_dims") if end.type == "Squeeze" else []
        removes = [_positive(index) for index in removed] == [axis]
        end = _only_reader(end, live) if removes else None
    if end is None or end.type != "BatchToSpaceND":
        return None
    return Moved(spread, middle, end, axis)


def _positive(axis: int | None) -> int | None:
    """Return an axis of images counted from the first one."""
    return None if axis is None else int(axis) % 4


def _only_reader(op: Operation, live: Liveness) -> Operation | None:
    readers = tuple(live.readers(op))
    return readers[0] if len(readers) == 1 and len(op.outputs) == 1 else None


def _is_plain(op: Operation) -> bool:
    """Tell whether an op is a convolution that looks at each place, without zeros."""
    if op.type not in CONVOLUTIONS_2D or data_format(op) != "NHWC":
        return False
    ones = {*op.get_attr("strides"), *op.get_attr("dilations")} == {1}
    window = op.inputs[1].shape
    known = window.rank == 4 and None not in window.as_list()[:2]
    return ones and known and bool(op.get_attr("padding") == b"VALID")


def _crops_data(moved: Moved) -> bool:
    """Tell whether more is cropped than zeros were added, as far as that is known."""
    before, padding, after, crops = (tf.get_static_value(t) for t in moved.numbers)
    if any(value is None for value in (before, padding, after, crops)):
        return False
    return not np.array_equal(before, after) or bool(np.any(padding < crops))


class Treatment(Enum):
    """What an op asks of the ranges of its result."""

    PASSES = "hands on values, and with them their range"
    KEEPS = "makes values between those it reads, in the same range"
    JOINS = "hands on values of several tensors, in one range"
    MAKES = "makes values of another range"
    FIXED = "makes values of a range that is known"


@dataclass(frozen=True)
class Kernel:
    """How the int8 kernel for a type of op works.

    Attributes:
        treatment: what it does to ranges.
        inputs: which inputs are data; None for all.
        range: the range that the kernel has built in.
        fuses: whether a Relu behind it becomes part of it.
        slot: what the FakeQuant op behind it is called.
        activation: whether it is an activation function, by its name.
    """

    treatment: Treatment
    inputs: tuple[int, ...] | None = (0,)
    range: tuple[float, float] | None = None
    fuses: bool = False
    slot: str = "act_quant"
    activation: str = ""

    def data_inputs(self, op: Operation) -> list[int]:
        """Return the indices of the inputs that need a range."""
        if self.inputs is None:
            return list(range(len(op.inputs)))
        return [i for i in self.inputs if i < len(op.inputs)]


def _passing(inputs: tuple[int, ...] = (0,)) -> Kernel:
    return Kernel(Treatment.PASSES, inputs)


def _passing_all() -> Kernel:
    return Kernel(Treatment.PASSES, None)


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
_KEEPING = Kernel(Treatment.KEEPS, (0,), slot="keep_quant")
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


_NEWEST: dict[str, Kernel] = {
    **dict.fromkeys(
        (
            "BatchToSpaceND",
            "BroadcastTo",
            "DepthToSpace",
            "EnsureShape",
            "ExpandDims",
            "Gather",
            "GatherNd",
            "GatherV2",
            "Identity",
            "Max",
            "MaxPool",
            "Min",
            "MirrorPad",
            "Pad",
            "PlaceholderWithDefault",
            "PreventGradient",
            "Reshape",
            "ResizeNearestNeighbor",
            "Roll",
            "Slice",
            "Snapshot",
            "SpaceToBatchND",
            "SpaceToDepth",
            "Squeeze",
            "StopGradient",
            "StridedSlice",
            "Tile",
            "Transpose",
        ),
        _passing(),
    ),
    "IdentityN": _passing_all(),
    # They pass ranges on, but the converter wants to see them at the end of a model.
    **dict.fromkeys(("PadV2", "ReverseV2", "SplitV", "TopKV2", "Unpack"), _KEEPING),
    "Split": Kernel(Treatment.KEEPS, (1,), slot="keep_quant"),
    "AvgPool": _POOLING,
    "ResizeBilinear": _KEEPING,
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
    found = {
        kind: kernel
        for kind, kernel in _NEWEST.items()
        if kind not in SINCE or SINCE[kind] <= version
    }
    if (2, 20) <= version < (2, 21):
        # Its converter wants to see what a BroadcastTo makes quantized, too.
        found["BroadcastTo"] = _KEEPING
    return found


KERNELS = kernels_of(version_of(tf.__version__))
"""The kernels of the TensorFlow that runs."""


def kernel_of(op: Operation) -> Kernel | None:
    """Return what computes an op in int8; None if nothing does.

    Before TensorFlow 2.20 the converter writes a BroadcastTo of up to four dimensions
    as a product with ones, which are a constant if the shape is known, and else are
    made in float. A SquaredDifference of more than four it writes as a difference and
    its square, between which no FakeQuant lies.
    """
    kernel = KERNELS.get(op.type)
    if op.type == "SquaredDifference":
        rank = op.outputs[0].shape.rank
        return None if rank is None or rank > 4 else kernel
    if kernel is not None or op.type != "BroadcastTo":
        return kernel
    shape = op.outputs[0].shape
    known = shape.rank is not None and (shape.rank > 4 or shape.is_fully_defined())
    return _KEEPING if known else None


PASSING = frozenset(
    kind for kind, kernel in _NEWEST.items() if kernel.treatment is Treatment.PASSES
)
"""Types of ops that hand values on, in int8 or not."""

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

FAKE_QUANT = frozenset(
    (
        "FakeQuantWithMinMaxArgs",
        "FakeQuantWithMinMaxVars",
        "FakeQuantWithMinMaxVarsPerChannel",
    )
)
