"""Memory that TensorFlow's CPU kernels allocate for themselves while they run.

`temporary_bytes` are TensorFlow's allocator's, read off the allocation records of
traced Sessions (TensorFlow 2.21). Kernels of oneDNN take next to nothing of it: 12 KB
for each convolution, in a batched product at most some hundred KB, 1.3 MB if both
operands are read transposed; these are left out, and so are some KB of depthwise
convolutions. `packed_bytes` are malloc's, read off its log and the resident set.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from geutil.graph.fetched_subgraph import uses_onednn
from geutil.graph.types import Operation, Tensor, dims_of
from geutil.memory.kernels.eigen import Caches, Product, caches_here, product_bytes
from geutil.memory.sizes import bytes_of_shape, dtype_bytes

DimsOf = Callable[[Tensor], Sequence[int | None] | None]
Machine = tuple[int, Caches]
"""The threads of an op, and the caches of the processor."""

_PROCESSORS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset(("avx512f", "avx_ne_convert"))

_CACHE = 30 << 20
"""The last cache that TensorFlow takes the processor to have, in bytes."""
_CORE_CACHE = 256 << 10
"""The cache of each core."""


def temporary_bytes(
    op: Operation, onednn: bool | None = None, dims: DimsOf = dims_of
) -> int:
    """Return the bytes that the kernel of an op allocates for itself.

    Args:
        op: the op; what depends on dimensions that are not known counts nothing.
        onednn: whether TensorFlow uses oneDNN; None for what this process does.
        dims: tells the shape of a tensor.

    Cost: that of reading some shapes.
    """
    if op.type == "Einsum":
        return _einsum_bytes(op, dims)
    if op.type == "MirrorPadGrad":
        return bytes_of_shape(op.inputs[0].dtype, dims(op.inputs[0])) or 0
    if op.type not in _WITHOUT_ONEDNN or runs_in_onednn(op, onednn):
        return 0
    return _WITHOUT_ONEDNN[op.type](op, dims)


def runs_in_onednn(op: Operation, onednn: bool | None = None) -> bool:
    """Tell whether a convolution, a pool or its gradient is one of oneDNN's kernels.

    These take no explicit padding in gradients. Processors of which they take float16
    are rare, so that it is taken to be none of theirs.

    Args:
        op: the op.
        onednn: as in `temporary_bytes`.
    """
    return _takes_type(op, onednn) and op.get_attr("padding") != b"EXPLICIT"


def _takes_type(op: Operation, onednn: bool | None) -> bool:
    """Tell whether oneDNN is used and has kernels of an op's type of numbers."""
    onednn = uses_onednn() if onednn is None else onednn
    dtype = op.outputs[0].dtype
    return onednn and (
        dtype == tf.float32 or (dtype == tf.bfloat16 and _takes_bfloat16())
    )


@cache
def _takes_bfloat16() -> bool:
    """Tell whether oneDNN has kernels of bfloat16 for this processor.

    TensorFlow asks for AVX-512, or AVX-NE-CONVERT. Where the processor's flags are not
    told they are taken to be there.
    """
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


class _Columns(NamedTuple):
    """The matrices of a convolution's gradient, for one image.

    Attributes:
        elements: those of the patches of the image, as the columns of a matrix.
        work: those together with the elements of the filter and of the gradient.
        each: the bytes of an element.
        images: how many there are; None if that is not known.
    """

    elements: int
    work: int
    each: int
    images: int | None

    @property
    def cached(self) -> int:
        """How many images fill the last cache, however few there are."""
        return -(-(_CACHE // self.each) // self.work)

    @property
    def bytes_in_cache(self) -> int:
        """The bytes of patches of so many images."""
        return self.cached * self.elements * self.each

    @property
    def untouched(self) -> int:
        """The bytes of these that are for images that there are not."""
        images = min(self.cached, self.images or self.cached)
        return (self.cached - images) * self.elements * self.each


def _columns(filters: Tensor, gradient: Tensor, dims: DimsOf) -> _Columns | None:
    """Return the matrices; None if they are not known."""
    kernel, image = dims(filters), dims(gradient)
    if not kernel or not image or None in (*image[1:], *kernel):
        return None
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in image[1:3])
    patch, depth = math.prod(dim or 0 for dim in kernel[:3]), kernel[3] or 0
    work = pixels * patch + pixels * depth + patch * depth
    return _Columns(pixels * patch, work, dtype_bytes(filters.dtype), image[0])


def _filter_gradient_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropFilter: patches of many images."""
    columns = _columns(op.outputs[0], op.inputs[2], dims)
    return columns.bytes_in_cache if columns and columns.work else 0


def _image_gradient_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropInput: patches of one image or of many."""
    columns = _columns(op.inputs[1], op.inputs[2], dims)
    if not columns or not columns.work:
        return 0
    if _takes_images_singly(columns, threads_of_ops()):
        return columns.elements * columns.each
    return columns.bytes_in_cache


def _takes_images_singly(columns: _Columns, threads: int) -> bool:
    """Tell whether one image is work enough for all threads, or there are no more."""
    share = columns.work // threads
    return columns.images == 1 or share >= _CORE_CACHE // columns.each


def _depthwise_filter_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the gradients of each image, which are added up then."""
    images = (dims(op.inputs[2]) or (None,))[0]
    size = bytes_of_shape(op.outputs[0].dtype, dims(op.outputs[0]))
    return ((images or 0) + 1) * (size or 0)


def _maxima_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the places of maxima, which are looked for anew."""
    return 8 * math.prod(dim or 0 for dim in dims(op.inputs[1]) or (0,))


_WITHOUT_ONEDNN = {
    "Conv2DBackpropFilter": _filter_gradient_bytes,
    "Conv2DBackpropInput": _image_gradient_bytes,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_bytes,
    "MaxPoolGrad": _maxima_bytes,
}


def _einsum_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the transposed copies that an Einsum works on.

    It multiplies matrices, so the labels of each operand have to be in the order batch,
    free, contracted; contracted before free will do, since a product can read a matrix
    transposed. An operand in another order is copied, and so is a product whose labels
    are in another order than asked for.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    left, _, result = equation.partition("->")
    operands = left.split(",")
    if len(operands) != 2 or "." in equation:
        return 0
    number = {
        label: i for i, label in enumerate(dict.fromkeys("".join(operands) + result))
    }
    kinds = {label: _kind(label, operands, result) for label in number}
    extent: dict[str, int] = {}
    for labels, tensor in zip(operands, op.inputs, strict=True):
        extent.update(zip(labels, _sizes(tensor, dims), strict=False))
    each = dtype_bytes(op.outputs[0].dtype)
    total = 0
    for labels in operands:
        straight = sorted(labels, key=lambda x: (kinds[x], number[x]))
        turned = sorted(labels, key=lambda x: (_TURNED[kinds[x]], number[x]))
        if list(labels) not in (straight, turned):
            total += each * _product(labels, extent)
    product_labels = [
        *sorted((x for x in result if kinds[x] == _BATCH), key=number.__getitem__),
        *(x for labels in operands for x in _free(labels, kinds, number)),
    ]
    if list(result) != product_labels:
        total += each * _product(result, extent)
    return total


_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)
_TURNED = (_BATCH, _CONTRACTED, _FREE, _REDUCED)


def _kind(label: str, operands: list[str], result: str) -> int:
    everywhere = all(label in labels for labels in operands)
    if label in result:
        return _BATCH if everywhere else _FREE
    return _CONTRACTED if everywhere else _REDUCED


def _free(labels: str, kinds: dict[str, int], number: dict[str, int]) -> list[str]:
    return sorted((x for x in labels if kinds[x] == _FREE), key=number.__getitem__)


def _sizes(tensor: Tensor, dims: DimsOf) -> list[int]:
    return [dim or 0 for dim in dims(tensor) or ()]


def _product(labels: str, extent: dict[str, int]) -> int:
    return math.prod(extent.get(label, 0) for label in labels)


def packed_bytes(
    op: Operation,
    onednn: bool | None = None,
    dims: DimsOf = dims_of,
    threads: int | None = None,
    caches: Caches | None = None,
) -> int:
    """Return the bytes that an op's kernel takes beside TensorFlow's allocator.

    Blocks and copies that it takes from malloc, less the part of its `temporary_bytes`
    that it never writes to: no page of memory is there for that. So it may be negative.

    Args:
        op: as in `temporary_bytes`.
        onednn: as in `temporary_bytes`.
        dims: as in `temporary_bytes`.
        threads: how many one op uses; None for those of this process.
        caches: those of the processor; None for this one's.

    Cost: that of reading some shapes.
    """
    if op.type in _COPIES:
        return _COPIES[op.type](op, dims)
    if op.type not in _PACKS:
        return 0
    takes = runs_in_onednn if "Backprop" in op.type else _takes_type
    if takes(op, onednn):
        rule = _ONEDNN_PACKS.get(op.type)
        return rule(op, dims) if rule else 0
    machine = (threads or threads_of_ops(), caches or caches_here())
    return _PACKS[op.type](op, dims, machine)


def _known(op: Operation, dims: DimsOf) -> list[list[int]] | None:
    """Return the shapes of an op's inputs and of its first output, if all are known."""
    shapes = [dims(tensor) for tensor in (*op.inputs, op.outputs[0])]
    if any(shape is None or None in shape for shape in shapes):
        return None
    return [[dim or 0 for dim in shape or ()] for shape in shapes]


def _convolution_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2D or Conv3D: blocks of patches, which are not made.

    A convolution of one by one reads the image as it is. Half precision is summed up in
    a result of float32, and written when the blocks are gone.
    """
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, filters, result = shapes[0], shapes[1], shapes[-1]
    strides = op.get_attr("strides")
    flat = len(image) == 4
    pointwise = flat and max(*filters[:-2], *strides) == 1
    product = Product(
        m=filters[-1],
        n=math.prod(result[:-1]),
        k=math.prod(filters[:-1]),
        each=max(4, dtype_bytes(op.outputs[0].dtype)),
        plain=(flat, pointwise),
    )
    blocks = product_bytes(product, *machine)
    size = op.outputs[0].dtype.size
    if size == product.each:
        return blocks
    elements = math.prod(result)
    return elements * product.each + max(0, blocks - elements * size)


def _filter_gradient_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2DBackpropFilter: blocks, and a part of the sum."""
    columns = _columns(op.outputs[0], op.inputs[2], dims)
    if not columns or not columns.work:
        return 0
    *_, depth = dims(op.outputs[0]) or (0,)
    patch = math.prod(dim or 0 for dim in (dims(op.outputs[0]) or ())[:3])
    images = min(columns.cached, columns.images or columns.cached)
    terms = images * (columns.elements // patch)
    product = Product(depth or 0, patch, terms, columns.each)
    own = patch * (depth or 0) * columns.each
    return own + product_bytes(product, *machine) - columns.untouched


def _image_gradient_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2DBackpropInput: blocks of one image's product."""
    columns = _columns(op.inputs[1], op.inputs[2], dims)
    if not columns or not columns.work:
        return 0
    if not _takes_images_singly(columns, machine[0]):
        return -columns.untouched
    kernel = [dim or 0 for dim in dims(op.inputs[1]) or ()]
    patch = math.prod(kernel[:3])
    product = Product(patch, columns.elements // patch, kernel[3], columns.each)
    return product_bytes(product, *machine)


def _volume_filter_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv3DBackpropFilterV2: all operands in another order."""
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, gradient, filters = shapes[0], shapes[2], shapes[-1]
    each = dtype_bytes(op.outputs[0].dtype)
    rows, width = math.prod(filters) // (filters[3] or 1), filters[3]
    product = Product(width, rows, math.prod(gradient[:4]), each)
    copies = math.prod(image) + math.prod(gradient) + math.prod(filters)
    return copies * each + product_bytes(product, *machine)


def _matrix_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a product of matrices, or of one after the other."""
    product = _product_of(op, dims)
    return product_bytes(product, *machine) if product else 0


def _product_of(op: Operation, dims: DimsOf) -> Product | None:
    """Return the product of matrices that Eigen's kernel of an op works on.

    None of small ones of a batch, and of vectors, which other kernels take.
    """
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
    return Product(m, n, k, each, plain)


def _einsum_packs(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of an Einsum, which multiplies matrices."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    left, _, result = equation.partition("->")
    operands = left.split(",")
    if len(operands) != 2 or "." in equation:
        return 0
    extent: dict[str, int] = {}
    for labels, tensor in zip(operands, op.inputs, strict=True):
        extent.update(zip(labels, _sizes(tensor, dims), strict=False))
    kinds = {label: _kind(label, operands, result) for label in extent}
    sizes = [
        _product("".join(x for x in labels if kinds[x] == kind), extent)
        for labels, kind in (
            (operands[1], _FREE),
            (operands[0], _FREE),
            (operands[0], _CONTRACTED),
        )
    ]
    batch = _product("".join(x for x in result if kinds[x] == _BATCH), extent)
    if min(sizes) <= 1 or (batch > 1 and math.prod(sizes) <= _SMALL_PRODUCT):
        return 0
    return product_bytes(Product(sizes[0], sizes[1], sizes[2]), *machine)


_SMALL_PRODUCT = 128 * 128
"""Multiplications in a product of a batch that one thread does alone."""

_PACKS = {
    "BatchMatMul": _matrix_packs,
    "BatchMatMulV2": _matrix_packs,
    "BatchMatMulV3": _matrix_packs,
    "Conv2D": _convolution_packs,
    "Conv2DBackpropFilter": _filter_gradient_packs,
    "Conv2DBackpropInput": _image_gradient_packs,
    "Conv3D": _convolution_packs,
    "Conv3DBackpropFilterV2": _volume_filter_packs,
    "Einsum": _einsum_packs,
    "MatMul": _matrix_packs,
    "_FusedConv2D": _convolution_packs,
    "_FusedMatMul": _matrix_packs,
}


def _result_bytes(op: Operation, dims: DimsOf) -> int:
    return bytes_of_shape(op.outputs[0].dtype, dims(op.outputs[0])) or 0


def _scores_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a copy of the logits."""
    return bytes_of_shape(op.inputs[0].dtype, dims(op.inputs[0])) or 0


_COPIES = {
    "LRN": _result_bytes,
    "SoftmaxCrossEntropyWithLogits": _scores_bytes,
}
"""Eigen's own kernels, with oneDNN, too, and copies that they take from malloc."""


def _filters_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the filters in oneDNN's order; of a sum in float32, too."""
    is_sum = op.type == "Conv2DBackpropFilter"
    filters = op.outputs[0] if is_sum else op.inputs[1]
    size = bytes_of_shape(filters.dtype, dims(filters)) or 0
    return size if filters.dtype == tf.float32 or not is_sum else 3 * size


def _gemm_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the blocks of oneDNN's product of float32.

    Measured with AVX-512, 1 to 14 MB in 92 products: those of the second operand, each
    thread's if there are rows for all, and 1 MB of the first one.
    """
    product = _product_of(op, dims)
    if op.outputs[0].dtype != tf.float32 or product is None:
        return 0
    if product.m < 768 or product.n < 512 or product.m * product.n < 1 << 19:
        return 0
    times = threads_of_ops() if product.n >= product.m else 1
    if product.k < (64 if times > 1 else 257):
        return 0
    depth = min(product.k, 384 if product.k >= 768 else 256)
    return (1 << 20) + product.m * depth * product.each * times


_ONEDNN_PACKS = {
    "Conv2D": _filters_bytes,
    "Conv2DBackpropFilter": _filters_bytes,
    "Conv2DBackpropInput": _filters_bytes,
    "MatMul": _gemm_bytes,
    "_FusedConv2D": _filters_bytes,
    "_FusedMatMul": _gemm_bytes,
}
