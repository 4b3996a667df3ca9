"""Buffers of TensorFlow's CPU kernels, by op type: in place, of results, temporary.

A type that is in no table makes new buffers for all of its outputs and no other, and
hands work to a thread.
"""

# Read off the allocation records and tensor addresses of traced Sessions (TensorFlow
# 2.21). Kernels of oneDNN allocate next to nothing for themselves: 12 KB for each
# convolution, in a batched product at most some hundred KB, 1.3 MB if both operands are
# read transposed; these are left out, and so are some KB of depthwise convolutions.

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from geutil.graph.op_types import FORWARDING, MERGES, SWITCHES, types_in
from geutil.graph.runtime import uses_onednn
from geutil.graph.types import Operation, Tensor, dims_of
from geutil.memory.sizes import bytes_of_shape, dtype_bytes

Pairs = Sequence[tuple[int, int]]
"""Pairs of places, of an output and of an input."""
DimsOf = Callable[[Tensor], Sequence[int | None] | None]
Rule = Callable[[Operation, DimsOf], int]
"""The bytes of a kernel, by the shapes of tensors; unknown dimensions count nothing."""


# Output 0 takes the buffer of input 0.
_FIRST: Pairs = ((0, 0),)
_NONE: Pairs = ()

HELD = types_in(
    """
    Const Placeholder PlaceholderV2 ReadVariableOp VarHandleOp Variable VariableV2 _Arg
    """
)
"""Their outputs are held anyway: by the graph, the caller or a variable."""

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
# Allocator::kAllocatorAlignment: a slice that starts elsewhere is copied.
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
    if kind in FORWARDING or kind in MERGES:
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
    """Return whether an op of a type yields its first input itself, whatever it is."""
    return op_type in FORWARDING


def is_held(op: Operation) -> bool:
    """Return whether the outputs of an op are held anyway."""
    # TensorFlow makes a constant of a `Fill` of constants (2.21: of any size with
    # Grappler, of up to 10 MiB without).
    if op.type != "Fill":
        return op.type in HELD
    are_constant = all(t.op.type in ("Const", "Shape") for t in op.inputs)
    is_known = op.outputs[0].shape.is_fully_defined()
    return are_constant and is_known and not op.control_inputs


def updates_variable(op_type: str) -> bool:
    """Return whether ops of a type change their first input's variable in place."""
    # While somebody still holds the value that was read, it does so in a new buffer.
    return op_type in _UPDATES or op_type.startswith("ResourceApply")


def _as_large(op: Operation) -> bool:
    elements = op.inputs[0].shape.num_elements()
    return elements is not None and elements == op.outputs[0].shape.num_elements()


def _rows(op: Operation) -> Pairs:
    """Return (output, input) for outputs that are rows in the buffer of the input."""
    # The first input of a Split is its axis.
    place = 1 if op.type == "Split" else 0
    whole = dims_of(op.inputs[place])
    if not whole or None in whole or not _rows_are_aligned(op, whole):
        return _NONE
    # Parts along another axis are strewn over the buffer, so the kernel copies them.
    if op.type == "Unpack" and op.get_attr("axis") != 0:
        return _NONE
    # These give one row, without its first axis.
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
    """Return whether rows lie where Eigen wants memory; kernels copy others."""
    # Kernels look at the bytes of one row, and in a vector at where a slice begins and
    # ends. A slice of every other row, or of rows backwards, is copied.
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


_CACHE = 30 << 20
"""The last cache that TensorFlow takes the processor to have, in bytes."""
_CORE_CACHE = 256 << 10
"""The cache of each core."""
_PROCESSORS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset(("avx512f", "avx_ne_convert"))


def temporary_bytes(
    op: Operation, onednn: bool | None = None, dims: DimsOf = dims_of
) -> int:
    """Return the bytes that an op's kernel allocates; unknown dimensions are 0."""
    if op.type in _ALLOCATED:
        return _ALLOCATED[op.type](op, dims)
    if op.type not in _ALLOCATED_WITHOUT_ONEDNN or runs_in_onednn(op, onednn):
        return 0
    return _ALLOCATED_WITHOUT_ONEDNN[op.type](op, dims)


def runs_in_onednn(op: Operation, onednn: bool | None = None) -> bool:
    """Return whether a convolution, a pool or its gradient runs in a oneDNN kernel."""
    # These take no explicit padding in gradients. Processors of which they take float16
    # are rare, so float16 counts as none of theirs.
    return takes_type(op, onednn) and op.get_attr("padding") != b"EXPLICIT"


def takes_type(op: Operation, onednn: bool | None) -> bool:
    """Return whether oneDNN is used and has kernels of an op's type of numbers."""
    onednn = uses_onednn() if onednn is None else onednn
    dtype = op.outputs[0].dtype
    return onednn and (
        dtype == tf.float32 or (dtype == tf.bfloat16 and _takes_bfloat16())
    )


@cache
def _takes_bfloat16() -> bool:
    """Return whether oneDNN has kernels of bfloat16 for this processor."""
    # TensorFlow asks for AVX-512, or AVX-NE-CONVERT; both are assumed where the system
    # does not tell.
    try:
        told = _PROCESSORS.read_text(encoding="utf-8")
    except OSError:
        return True
    flags = re.search(r"^flags\s*:(.*)$", told, re.MULTILINE)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def threads_of_ops() -> int:
    """Return how many threads one op of this process may use; a Session may differ."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if threads:
        return int(threads)
    # As TensorFlow counts; macOS and Windows do not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bytes_at(tensor: Tensor, dims: DimsOf) -> int:
    """Return the bytes of a tensor, 0 if they are unknown."""
    return bytes_of_shape(tensor.dtype, dims(tensor)) or 0


def sizes_at(tensor: Tensor, dims: DimsOf) -> list[int]:
    """Return the shape of a tensor, 0 for unknown dimensions."""
    return [dim or 0 for dim in dims(tensor) or ()]


class Columns(NamedTuple):
    """The matrices of a convolution's gradient, for one image."""

    # How many patches the image has.
    pixels: int
    # The elements of each patch, a column of a matrix.
    patch: int
    # How many filters there are.
    depth: int
    # The bytes of an element.
    each: int
    # None if that is not known.
    images: int | None

    @property
    def work(self) -> int:
        """The elements of the patches, of the filters and of the gradient."""
        return (self.pixels + self.depth) * self.patch + self.pixels * self.depth

    @property
    def bytes(self) -> int:
        """The bytes of the patches of an image."""
        return self.pixels * self.patch * self.each

    @property
    def cached(self) -> int:
        """How many images fill the last cache, however few there are."""
        return -(-(_CACHE // self.each) // self.work)

    @property
    def untouched(self) -> int:
        """The bytes of patches in the cache that are for images that there are not."""
        return (self.cached - min(self.cached, self.images or self.cached)) * self.bytes

    def are_single(self, threads: int) -> bool:
        """Return whether one image is work enough for all threads, or there is one."""
        share = self.work // threads
        return self.images == 1 or share >= _CORE_CACHE // self.each


def columns_of(op: Operation, dims: DimsOf) -> Columns | None:
    """Return the matrices of a gradient; None if they are unknown."""
    filters = op.outputs[0] if op.type.endswith("Filter") else op.inputs[1]
    kernel, image = dims(filters), dims(op.inputs[2])
    if not kernel or not image or None in (*image[1:], *kernel):
        return None
    *patch, depth = sizes_at(filters, dims)
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in image[1:3])
    each = dtype_bytes(filters.dtype)
    columns = Columns(pixels, math.prod(patch), depth, each, image[0])
    return columns if columns.work else None


def _patches(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the patches of many images, or of one for its gradient."""
    columns = columns_of(op, dims)
    if columns is None:
        return 0
    of_image = op.type == "Conv2DBackpropInput"
    is_single = of_image and columns.are_single(threads_of_ops())
    return columns.bytes * (1 if is_single else columns.cached)


BATCH, FREE, CONTRACTED, REDUCED = range(4)
"""The kinds of labels of an Einsum."""


class EinsumLabels:
    """The labels of an Einsum, by kind and by place in the equation."""

    def __init__(self, op: Operation, dims: DimsOf) -> None:
        equation = op.get_attr("equation").decode().replace(" ", "")
        left, _, self.result = equation.partition("->")
        terms = left.split(",")
        self.terms = terms if len(terms) == 2 and "." not in equation else []
        self._labels = list(dict.fromkeys(left.replace(",", "") + self.result))
        self._sizes: dict[str, int] = {}
        for term, tensor in zip(self.terms, op.inputs, strict=False):
            self._sizes.update(zip(term, sizes_at(tensor, dims), strict=False))

    def elements(self, labels: Iterable[str]) -> int:
        """Return the product of the dimensions of some labels, 0 if unknown."""
        return math.prod(self._sizes.get(label, 0) for label in labels)

    def sorted(self, labels: str, *kinds: int) -> list[str]:
        """Return those labels that are of some kinds, kind by kind."""
        found = [(self._kind(x), x) for x in self._labels if x in labels]
        return [x for kind in kinds for of, x in found if of == kind]

    def _kind(self, label: str) -> int:
        everywhere = all(label in term for term in self.terms)
        if label in self.result:
            return BATCH if everywhere else FREE
        return CONTRACTED if everywhere else REDUCED


def _transposed(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the transposed copies that an Einsum works on."""
    # It multiplies matrices, so the labels of each operand have to be in the order
    # batch, free, contracted; contracted before free will do, since a product can read
    # a matrix transposed. An operand in another order is copied, and so is a product
    # whose labels are in another order than asked for.
    einsum = EinsumLabels(op, dims)
    copied = []
    for term in einsum.terms:
        straight = einsum.sorted(term, BATCH, FREE, CONTRACTED, REDUCED)
        turned = einsum.sorted(term, BATCH, CONTRACTED, FREE, REDUCED)
        if list(term) not in (straight, turned):
            copied.append(term)
    made = einsum.sorted(einsum.result, BATCH)
    made += [x for term in einsum.terms for x in einsum.sorted(term, FREE)]
    if einsum.terms and list(einsum.result) != made:
        copied.append(einsum.result)
    return dtype_bytes(op.outputs[0].dtype) * sum(map(einsum.elements, copied))


def first_input(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of an op's first input."""
    return bytes_at(op.inputs[0], dims)


_ALLOCATED: Mapping[str, Rule] = {"Einsum": _transposed, "MirrorPadGrad": first_input}
_ALLOCATED_WITHOUT_ONEDNN: Mapping[str, Rule] = {
    "Conv2DBackpropFilter": _patches,
    "Conv2DBackpropInput": _patches,
    # A gradient of each image, which are added up then.
    "DepthwiseConv2dNativeBackpropFilter": lambda op, dims: (
        (1 + (sizes_at(op.inputs[2], dims) or [0])[0]) * bytes_at(op.outputs[0], dims)
    ),
    # The places of maxima, which are looked for anew.
    "MaxPoolGrad": lambda op, dims: 8 * math.prod(sizes_at(op.inputs[1], dims) or (0,)),
}
