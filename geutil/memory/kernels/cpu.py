"""Buffers of TensorFlow's CPU kernels, by op type: in place, of results, temporary.

A type that is in no table makes new buffers for all of its outputs and no other, and
hands work to a thread.

Some kernels take memory from malloc besides. Eigen copies blocks of both operands of a
product so that a core reads them in a row, and so do MatMul and convolutions without
oneDNN. A product's result has `n` rows of `m` columns, and `k` terms are summed up:
Eigen sees the rows of TensorFlow as columns. Its left operand is the second one here,
`k` by `m`.
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
from geutil.graph.types import Operation, Tensor, bytes_of_shape, dims_of, dtype_bytes

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
    return _takes_type(op, onednn) and op.get_attr("padding") != b"EXPLICIT"


def _takes_type(op: Operation, onednn: bool | None) -> bool:
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


def _sizes_at(tensor: Tensor, dims: DimsOf) -> list[int]:
    """Return the shape of a tensor, 0 for unknown dimensions."""
    return [dim or 0 for dim in dims(tensor) or ()]


class _Columns(NamedTuple):
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


def _columns_of(op: Operation, dims: DimsOf) -> _Columns | None:
    """Return the matrices of a gradient; None if they are unknown."""
    filters = op.outputs[0] if op.type.endswith("Filter") else op.inputs[1]
    kernel, image = dims(filters), dims(op.inputs[2])
    if not kernel or not image or None in (*image[1:], *kernel):
        return None
    *patch, depth = _sizes_at(filters, dims)
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in image[1:3])
    each = dtype_bytes(filters.dtype)
    columns = _Columns(pixels, math.prod(patch), depth, each, image[0])
    return columns if columns.work else None


def _patches(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the patches of many images, or of one for its gradient."""
    columns = _columns_of(op, dims)
    if columns is None:
        return 0
    of_image = op.type == "Conv2DBackpropInput"
    is_single = of_image and columns.are_single(threads_of_ops())
    return columns.bytes * (1 if is_single else columns.cached)


_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)
"""The kinds of labels of an Einsum."""


class _EinsumLabels:
    """The labels of an Einsum, by kind and by place in the equation."""

    def __init__(self, op: Operation, dims: DimsOf) -> None:
        equation = op.get_attr("equation").decode().replace(" ", "")
        left, _, self.result = equation.partition("->")
        terms = left.split(",")
        self.terms = terms if len(terms) == 2 and "." not in equation else []
        self._labels = list(dict.fromkeys(left.replace(",", "") + self.result))
        self._sizes: dict[str, int] = {}
        for term, tensor in zip(self.terms, op.inputs, strict=False):
            self._sizes.update(zip(term, _sizes_at(tensor, dims), strict=False))

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
            return _BATCH if everywhere else _FREE
        return _CONTRACTED if everywhere else _REDUCED


def _transposed(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the transposed copies that an Einsum works on."""
    # It multiplies matrices, so the labels of each operand have to be in the order
    # batch, free, contracted; contracted before free will do, since a product can read
    # a matrix transposed. An operand in another order is copied, and so is a product
    # whose labels are in another order than asked for.
    einsum = _EinsumLabels(op, dims)
    copied = []
    for term in einsum.terms:
        straight = einsum.sorted(term, _BATCH, _FREE, _CONTRACTED, _REDUCED)
        turned = einsum.sorted(term, _BATCH, _CONTRACTED, _FREE, _REDUCED)
        if list(term) not in (straight, turned):
            copied.append(term)
    made = einsum.sorted(einsum.result, _BATCH)
    made += [x for term in einsum.terms for x in einsum.sorted(term, _FREE)]
    if einsum.terms and list(einsum.result) != made:
        copied.append(einsum.result)
    return dtype_bytes(op.outputs[0].dtype) * sum(map(einsum.elements, copied))


def _first_input(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of an op's first input."""
    return bytes_at(op.inputs[0], dims)


_ALLOCATED: Mapping[str, Rule] = {"Einsum": _transposed, "MirrorPadGrad": _first_input}
_ALLOCATED_WITHOUT_ONEDNN: Mapping[str, Rule] = {
    "Conv2DBackpropFilter": _patches,
    "Conv2DBackpropInput": _patches,
    # A gradient of each image, which are added up then.
    "DepthwiseConv2dNativeBackpropFilter": lambda op, dims: (
        (1 + (_sizes_at(op.inputs[2], dims) or [0])[0]) * bytes_at(op.outputs[0], dims)
    ),
    # The places of maxima, which are looked for anew.
    "MaxPoolGrad": lambda op, dims: (
        8 * math.prod(_sizes_at(op.inputs[1], dims) or (0,))
    ),
}


# How large the blocks are follows from the caches and the threads, by rules that are
# read off the headers that TensorFlow 2.21 comes with (TensorContractionThreadPool.h,
# GeneralBlockPanelKernel.h, eigen_contraction_kernel.h), for x86; each size was
# compared with malloc's log in 100 products, and the sums with the resident set.
_REGISTERS = 16
"""Rows of the left operand that the innermost loop takes (AVX)."""
_COLUMNS = 4
"""Columns of the right operand that it takes."""
_OWN_CACHE = 3 << 19
"""The cache that one thread alone is assumed to have, in bytes."""
_SMALL_PRODUCT = 128 * 128
"""Multiplications in a product of a batch that one thread does alone."""


class _Caches(NamedTuple):
    """The bytes of a processor's caches: first and second of a core, third of all."""

    first: int = 32 << 10
    second: int = 256 << 10
    third: int = 2 << 20


@cache
def _caches_here() -> _Caches:
    """Return the caches of this machine; those that Eigen assumes if none are known."""
    sizes = list(_Caches())
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            kind, level, size = (
                (index / name).read_text().strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        known = re.fullmatch(r"(\d+)K", size)
        # Caches of instructions hold no tensors.
        if kind != "Instruction" and known and int(level) <= len(sizes):
            sizes[int(level) - 1] = int(known[1]) << 10
    return _Caches(*sizes)


def packed_bytes(
    op: Operation, onednn: bool | None = None, dims: DimsOf = dims_of
) -> int:
    """Return the bytes that an op's kernel takes outside TensorFlow's allocator."""
    # Blocks and copies that it takes from malloc, less the part of its
    # `temporary_bytes` that it never writes to: no page of memory is there for that. So
    # it may be negative.
    if op.type in _COPIES:
        return _COPIES[op.type](op, dims)
    if op.type not in _PACKS:
        return 0
    with_eigen, with_onednn = _PACKS[op.type]
    takes = runs_in_onednn if "Backprop" in op.type else _takes_type
    if takes(op, onednn):
        return with_onednn(op, dims) if with_onednn else 0
    return with_eigen(op, dims)


class _Product(NamedTuple):
    """A product of matrices: `m` columns and `n` rows of sums of `k` terms."""

    m: int
    n: int
    k: int
    # The bytes of an element.
    each: int = 4
    # True where the left and the right operand (the second and the first of a MatMul)
    # lie in memory as Eigen would pack them, but for the gaps.
    plain: tuple[bool, bool] = (False, False)


def _packed(product: _Product) -> int:
    """Return the bytes of a product's blocks in this process, on this machine."""
    return _product_bytes(product, threads_of_ops(), _caches_here())


def _product_bytes(product: _Product, threads: int, caches: _Caches) -> int:
    """Return the bytes of the blocks that Eigen packs for a product."""
    # Those that it writes: malloc returns more, which no page of memory is needed for.
    m, n, k, each, plain = product
    if min(product[:4]) <= 0 or n == 1:
        return 0
    if threads > 1 and _shards_terms(product, threads, caches):
        part = _Product(m, n, -(-k // threads), each)
        bm, bn, bk = _blocks(part, threads, caches, by_columns=True)
        return ((threads - 1) * m * n + threads * (bm + bn) * bk) * each
    by_columns = threads == 1 or _shards_columns(m, n, threads)
    bm, bn, bk = _blocks(product, threads, caches, by_columns)
    across, along = -(-m // bm), -(-n // bn)
    if threads == 1:
        left, right = bm, bn
    else:
        slices = min(-(-k // bk), 2)
        left, right = slices * m, slices * n
    # With as many tasks in a row each thread has blocks that it packs again and again.
    # A task of several blocks takes so many cycles at most.
    grain = max(1, int(80_000 / (bm * bn * (bk * _cycles(bm, bn) + 0.7))))
    tasks = -(-(along if by_columns else across) // grain)
    if threads > 1 and tasks >= _tasks_enough(threads) * threads:
        if by_columns:
            right = threads * grain * bn
        else:
            left = threads * grain * bm
    if plain[0] and _read_in_place(m == bm, along, m * bk * each):
        left = 0
    if plain[1] and _read_in_place(k == bk, across, k * bn * each):
        right = 0
    return (left + right) * bk * each


def _read_in_place(whole: bool, times: int, size: int) -> bool:
    """Return whether an operand without gaps is read where it lies, not packed."""
    return whole or times == 1 or (times == 2 and size < 256 << 10)


def _tasks_enough(threads: int) -> float:
    """Return how many tasks for each thread let a thread keep to a row of them."""
    table = ((4, 8.0), (8, 4.0), (16, 2.0), (32, 1.0), (64, 0.8))
    return next((enough for most, enough in table if threads <= most), 0.6)


def _shards_columns(m: int, n: int, threads: int) -> bool:
    """Return whether threads share the columns of the right operand."""
    nr = _COLUMNS
    of_each = n // threads
    few = of_each < nr
    uneven = of_each < 4 * nr and n % (threads * nr) != 0
    even_rows = m % (threads * nr) == 0 or m // n >= 6
    if m // threads >= nr and (few or (uneven and even_rows)):
        return False
    return not (of_each < 16 * nr and m > n * 32)


def _shards_terms(product: _Product, threads: int, caches: _Caches) -> bool:
    """Return whether each thread sums up a part of the terms."""
    m, n, k, each, _ = product
    size, nr, terms = m * n, _COLUMNS, k // threads
    if size * each > caches.third // threads or terms < 2 * nr:
        return False
    narrow = terms > 8 * nr and min(m, n) < 2 * nr
    if max(m, n) // threads >= nr and not narrow:
        return False
    # Eigen's own costs in cycles: products, loads; then the threads and the sum of all.
    alone = k * (size * _cycles(m, n) + 0.7 * (n + 1))
    return alone / threads + 100_000 + threads * (0.64 * size + 3000) < alone


def _cycles(m: int, n: int) -> float:
    """Return Eigen's cost of one term of an element, in cycles."""
    return 1 / 8 if m >= _REGISTERS and n >= _COLUMNS else 1 / 4


def _blocks(
    product: _Product, threads: int, caches: _Caches, by_columns: bool
) -> tuple[int, int, int]:
    """Return the rows, columns and terms of a block."""
    m, n, k, each, _ = product
    choose = _of_one_thread if threads == 1 else _of_threads
    if by_columns:
        bm, bn, bk = choose(m, n, k, each, threads, caches)
    else:
        bn, bm, bk = choose(n, m, k, each, threads, caches)
    # Products of float32 are oneDNN's in any case, which likes blocks of these sizes.
    if each == 4:
        bm = min(m, -(-int(bm * 1.5) // 48) * 48)
        bn = min(n, -(-bn // 24) * 24)
        bk = min(k, -(-(k // -(-k // bk)) // 8) * 8)
    return min(bm, m), min(bn, n), min(bk, k)


def _of_threads(
    m: int, n: int, k: int, each: int, threads: int, caches: _Caches
) -> tuple[int, int, int]:
    mr, nr = _REGISTERS, _COLUMNS
    deepest = max(8, min((caches.first - 4 * mr * nr) // ((mr + nr) * each), 320))
    bk = deepest - deepest % 8 if deepest < k else k
    fits = (caches.second - caches.first) // (nr * each * bk)
    share = -(-n // threads)
    bn = fits - fits % nr if fits <= share else min(n, -(-share // nr) * nr)
    if caches.third <= caches.second:
        return m, bn, bk
    fits = (caches.third - caches.second) // (each * bk * threads)
    share = -(-m // threads)
    bm = fits - fits % mr if mr <= fits < share else min(m, -(-share // mr) * mr)
    return bm, bn, bk


def _of_one_thread(
    m: int, n: int, k: int, each: int, _: int, caches: _Caches
) -> tuple[int, int, int]:
    mr, nr = _REGISTERS, _COLUMNS
    # Eigen does not block products as small as that.
    if max(m, n, k) < 48:
        return m, n, k
    block = 4 * mr * nr
    deepest = max((caches.first - block) // ((mr + nr) * each) & ~7, 1)
    bk = _even(k, deepest, 8)
    left = caches.first - block - m * bk * each
    if left >= nr * each * bk:
        most = left // (bk * each)
    else:
        most = 3 * _OWN_CACHE // (4 * deepest * each)
    bn = min(_OWN_CACHE // (2 * bk * each), most) & -nr
    if n > bn:
        return m, _even(n, bn, nr), bk
    if bk < k:
        return m, n, bk
    size, bm = k * n * each, m
    cached = _OWN_CACHE
    if size <= 1024:
        cached = caches.first
    elif size <= 32768:
        cached, bm = caches.second, min(576, m)
    bm = min(cached // (3 * k * each), bm)
    if bm > mr:
        bm -= bm % mr
    return (_even(m, bm, mr) if bm else m), n, bk


def _even(size: int, most: int, step: int) -> int:
    """Return the blocks of a size, none above `most`, that are about as large."""
    rest = size % most
    if size <= most or not rest:
        return min(size, most)
    return most - step * ((most - rest) // (step * (size // most + 1)))


def _known(op: Operation, dims: DimsOf) -> list[list[int]] | None:
    """Return the shapes of an op's inputs and of its first output, if all are known."""
    tensors = (*op.inputs, op.outputs[0])
    if any((shape := dims(t)) is None or None in shape for t in tensors):
        return None
    return [_sizes_at(t, dims) for t in tensors]


def _convolution_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2D or Conv3D: blocks of patches, which are not made."""
    # A convolution of one by one reads the image as it is. Half precision is summed up
    # in a result of float32, and written when the blocks are gone.
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, filters, result = shapes[0], shapes[1], shapes[-1]
    flat = len(image) == 4
    pointwise = flat and max(*filters[:-2], *op.get_attr("strides")) == 1
    product = _Product(
        m=filters[-1],
        n=math.prod(result[:-1]),
        k=math.prod(filters[:-1]),
        each=max(4, dtype_bytes(op.outputs[0].dtype)),
        plain=(flat, pointwise),
    )
    blocks = _packed(product)
    size = op.outputs[0].dtype.size
    if size == product.each:
        return blocks
    elements = math.prod(result)
    return elements * product.each + max(0, blocks - elements * size)


def _filter_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropFilter: blocks, and a part of the sum."""
    columns = _columns_of(op, dims)
    if not columns:
        return 0
    _, patch, depth, each, images = columns
    terms = min(columns.cached, images or columns.cached) * columns.pixels
    blocks = _packed(_Product(depth, patch, terms, each))
    return patch * depth * each + blocks - columns.untouched


def _image_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropInput: blocks of one image's product."""
    columns = _columns_of(op, dims)
    if not columns:
        return 0
    if not columns.are_single(threads_of_ops()):
        return -columns.untouched
    pixels, patch, depth, each, _ = columns
    return _packed(_Product(patch, pixels, depth, each))


def _volume_filter_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv3DBackpropFilterV2: all operands in another order."""
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, gradient, filters = shapes[0], shapes[2], shapes[-1]
    each = dtype_bytes(op.outputs[0].dtype)
    rows, width = math.prod(filters) // (filters[3] or 1), filters[3]
    product = _Product(width, rows, math.prod(gradient[:4]), each)
    copies = sum(map(math.prod, (image, gradient, filters)))
    return copies * each + _packed(product)


def _matrix_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a product of matrices, or of one after the other."""
    product = _einsum_product(op, dims) if op.type == "Einsum" else _product(op, dims)
    return _packed(product) if product else 0


def _product(op: Operation, dims: DimsOf) -> _Product | None:
    """Return the product of matrices that Eigen's kernel of an op works on."""
    # None of small ones of a batch, and of vectors, which other kernels take.
    shapes = _known(op, dims)
    if shapes is None or min(map(len, shapes)) < 2:
        return None
    left, result = shapes[0], shapes[-1]
    in_batch = op.type.startswith("Batch")
    names = ("adj_x", "adj_y") if in_batch else ("transpose_a", "transpose_b")
    turned = [op.get_attr(name) for name in names]
    n, m = result[-2:]
    k = left[-2] if turned[0] else left[-1]
    alone = math.prod(result[:-2]) == 1
    if min(m, n, k) <= 1 or (not alone and m * n * k <= _SMALL_PRODUCT):
        return None
    plain = (alone and not turned[1], alone and not turned[0])
    # Half precision is multiplied as float32.
    each = max(4, dtype_bytes(op.outputs[0].dtype)) if alone else 4
    return _Product(m, n, k, each, plain)


def _einsum_product(op: Operation, dims: DimsOf) -> _Product | None:
    """Return the product of matrices that an Einsum comes to."""
    einsum = _EinsumLabels(op, dims)
    if not einsum.terms:
        return None
    left, right = einsum.terms
    m = einsum.elements(einsum.sorted(right, _FREE))
    n = einsum.elements(einsum.sorted(left, _FREE))
    k = einsum.elements(einsum.sorted(left, _CONTRACTED))
    batch = einsum.elements(einsum.sorted(einsum.result, _BATCH))
    if min(m, n, k) <= 1 or (batch > 1 and m * n * k <= _SMALL_PRODUCT):
        return None
    return _Product(m, n, k)


def _reordered_filters(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the filters in oneDNN's order; of a sum in float32, too."""
    is_sum = op.type == "Conv2DBackpropFilter"
    filters = op.outputs[0] if is_sum else op.inputs[1]
    times = 1 if filters.dtype == tf.float32 or not is_sum else 3
    return times * bytes_at(filters, dims)


def _gemm_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the blocks of oneDNN's product of float32."""
    # Measured with AVX-512, 1 to 14 MB in 92 products: those of the second operand,
    # each thread's if there are rows for all, and 1 MB of the first one.
    product = _product(op, dims)
    if op.outputs[0].dtype != tf.float32 or product is None:
        return 0
    if product.m < 768 or product.n < 512 or product.m * product.n < 1 << 19:
        return 0
    times = threads_of_ops() if product.n >= product.m else 1
    if product.k < (64 if times > 1 else 257):
        return 0
    depth = min(product.k, 384 if product.k >= 768 else 256)
    return (1 << 20) + product.m * depth * product.each * times


_PACKS: Mapping[str, tuple[Rule, Rule | None]] = {
    kind: (with_eigen, with_onednn)
    for kinds, with_eigen, with_onednn in (
        ("BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum", _matrix_blocks, None),
        ("Conv2D _FusedConv2D", _convolution_blocks, _reordered_filters),
        ("Conv2DBackpropFilter", _filter_blocks, _reordered_filters),
        ("Conv2DBackpropInput", _image_blocks, _reordered_filters),
        ("Conv3D", _convolution_blocks, None),
        ("Conv3DBackpropFilterV2", _volume_filter_blocks, None),
        ("MatMul _FusedMatMul", _matrix_blocks, _gemm_blocks),
    )
    for kind in kinds.split()
}
"""The bytes that kernels take from malloc: Eigen's, and oneDNN's if it takes some."""
_COPIES: Mapping[str, Rule] = {
    "LRN": lambda op, dims: bytes_at(op.outputs[0], dims),
    "SoftmaxCrossEntropyWithLogits": _first_input,
}
"""Eigen's own kernels, with oneDNN, too, and copies that they take from malloc."""
