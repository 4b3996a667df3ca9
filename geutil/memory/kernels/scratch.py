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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
Rule = Callable[[Operation, DimsOf], int]
BlockRule = Callable[[Operation, DimsOf, Machine], int]

_PROCESSORS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset(("avx512f", "avx_ne_convert"))

_CACHE = 30 << 20
"""The last cache that TensorFlow takes the processor to have, in bytes."""
_CORE_CACHE = 256 << 10
"""The cache of each core."""
_SMALL_PRODUCT = 128 * 128
"""Multiplications in a product of a batch that one thread does alone."""


def temporary_bytes(
    op: Operation, onednn: bool | None = None, dims: DimsOf = dims_of
) -> int:
    """Return the bytes that an op's kernel allocates; unknown dimensions are 0."""
    if op.type in _ALLOCATED:
        return _ALLOCATED[op.type](op, dims)
    if op.type not in _ALLOCATED_WITHOUT_ONEDNN or runs_in_onednn(op, onednn):
        return 0
    return _ALLOCATED_WITHOUT_ONEDNN[op.type](op, dims)


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
    `threads` and `caches` are those of this process and processor, if they are None.
    """
    if op.type in _COPIES:
        return _COPIES[op.type](op, dims)
    if op.type not in _PACKS:
        return 0
    with_eigen, with_onednn = _PACKS[op.type]
    takes = runs_in_onednn if "Backprop" in op.type else _takes_type
    if takes(op, onednn):
        return with_onednn(op, dims) if with_onednn else 0
    return with_eigen(op, dims, (threads or threads_of_ops(), caches or caches_here()))


def runs_in_onednn(op: Operation, onednn: bool | None = None) -> bool:
    """Tell whether a convolution, a pool or its gradient is one of oneDNN's kernels.

    These take no explicit padding in gradients. Processors of which they take float16
    are rare, so that it is taken to be none of theirs.
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

    TensorFlow asks for AVX-512, or AVX-NE-CONVERT; both are assumed where it is not
    told.
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


def _bytes(tensor: Tensor, dims: DimsOf) -> int:
    """Return the bytes of a tensor, 0 if they are not known."""
    return bytes_of_shape(tensor.dtype, dims(tensor)) or 0


def _sizes(tensor: Tensor, dims: DimsOf) -> list[int]:
    return [dim or 0 for dim in dims(tensor) or ()]


def _known(op: Operation, dims: DimsOf) -> list[list[int]] | None:
    """Return the shapes of an op's inputs and of its first output, if all are known."""
    tensors = (*op.inputs, op.outputs[0])
    if any((shape := dims(t)) is None or None in shape for t in tensors):
        return None
    return [_sizes(t, dims) for t in tensors]


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
        """Tell whether one image is work enough for all threads, or there is one."""
        share = self.work // threads
        return self.images == 1 or share >= _CORE_CACHE // self.each


def _columns(op: Operation, dims: DimsOf) -> _Columns | None:
    """Return the matrices of a gradient; None if they are not known."""
    filters = op.outputs[0] if op.type.endswith("Filter") else op.inputs[1]
    kernel, image = dims(filters), dims(op.inputs[2])
    if not kernel or not image or None in (*image[1:], *kernel):
        return None
    *patch, depth = _sizes(filters, dims)
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in image[1:3])
    each = dtype_bytes(filters.dtype)
    columns = _Columns(pixels, math.prod(patch), depth, each, image[0])
    return columns if columns.work else None


def _patches(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the patches of many images, or of one for its gradient."""
    columns = _columns(op, dims)
    if columns is None:
        return 0
    of_image = op.type == "Conv2DBackpropInput"
    is_single = of_image and columns.are_single(threads_of_ops())
    return columns.bytes * (1 if is_single else columns.cached)


_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)
"""The kinds of labels of an Einsum."""


class _Einsum:
    """The labels of an Einsum, by kind and by place in the equation."""

    def __init__(self, op: Operation, dims: DimsOf) -> None:
        equation = op.get_attr("equation").decode().replace(" ", "")
        left, _, self.result = equation.partition("->")
        terms = left.split(",")
        self.terms = terms if len(terms) == 2 and "." not in equation else []
        self._labels = list(dict.fromkeys(left.replace(",", "") + self.result))
        self._sizes: dict[str, int] = {}
        for term, tensor in zip(self.terms, op.inputs, strict=False):
            self._sizes.update(zip(term, _sizes(tensor, dims), strict=False))

    def elements(self, labels: Iterable[str]) -> int:
        """Return the elements of what has some labels, 0 if that is not known."""
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
    """Return the bytes of the transposed copies that an Einsum works on.

    It multiplies matrices, so the labels of each operand have to be in the order batch,
    free, contracted; contracted before free will do, since a product can read a matrix
    transposed. An operand in another order is copied, and so is a product whose labels
    are in another order than asked for.
    """
    einsum = _Einsum(op, dims)
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
    return _bytes(op.inputs[0], dims)


_ALLOCATED: Mapping[str, Rule] = {"Einsum": _transposed, "MirrorPadGrad": _first_input}
_ALLOCATED_WITHOUT_ONEDNN: Mapping[str, Rule] = {
    "Conv2DBackpropFilter": _patches,
    "Conv2DBackpropInput": _patches,
    # A gradient of each image, which are added up then.
    "DepthwiseConv2dNativeBackpropFilter": lambda op, dims: (
        (1 + (_sizes(op.inputs[2], dims) or [0])[0]) * _bytes(op.outputs[0], dims)
    ),
    # The places of maxima, which are looked for anew.
    "MaxPoolGrad": lambda op, dims: 8 * math.prod(_sizes(op.inputs[1], dims) or (0,)),
}


def _convolution_blocks(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2D or Conv3D: blocks of patches, which are not made.

    A convolution of one by one reads the image as it is. Half precision is summed up in
    a result of float32, and written when the blocks are gone.
    """
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, filters, result = shapes[0], shapes[1], shapes[-1]
    flat = len(image) == 4
    pointwise = flat and max(*filters[:-2], *op.get_attr("strides")) == 1
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


def _filter_blocks(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2DBackpropFilter: blocks, and a part of the sum."""
    columns = _columns(op, dims)
    if not columns:
        return 0
    _, patch, depth, each, images = columns
    terms = min(columns.cached, images or columns.cached) * columns.pixels
    blocks = product_bytes(Product(depth, patch, terms, each), *machine)
    return patch * depth * each + blocks - columns.untouched


def _image_blocks(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv2DBackpropInput: blocks of one image's product."""
    columns = _columns(op, dims)
    if not columns:
        return 0
    if not columns.are_single(machine[0]):
        return -columns.untouched
    pixels, patch, depth, each, _ = columns
    return product_bytes(Product(patch, pixels, depth, each), *machine)


def _volume_filter_blocks(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a Conv3DBackpropFilterV2: all operands in another order."""
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, gradient, filters = shapes[0], shapes[2], shapes[-1]
    each = dtype_bytes(op.outputs[0].dtype)
    rows, width = math.prod(filters) // (filters[3] or 1), filters[3]
    product = Product(width, rows, math.prod(gradient[:4]), each)
    copies = sum(map(math.prod, (image, gradient, filters)))
    return copies * each + product_bytes(product, *machine)


def _matrix_blocks(op: Operation, dims: DimsOf, machine: Machine) -> int:
    """Return the bytes of a product of matrices, or of one after the other."""
    product = _einsum_product(op, dims) if op.type == "Einsum" else _product(op, dims)
    return product_bytes(product, *machine) if product else 0


def _product(op: Operation, dims: DimsOf) -> Product | None:
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


def _einsum_product(op: Operation, dims: DimsOf) -> Product | None:
    """Return the product of matrices that an Einsum comes to."""
    einsum = _Einsum(op, dims)
    if not einsum.terms:
        return None
    left, right = einsum.terms
    m = einsum.elements(einsum.sorted(right, _FREE))
    n = einsum.elements(einsum.sorted(left, _FREE))
    k = einsum.elements(einsum.sorted(left, _CONTRACTED))
    batch = einsum.elements(einsum.sorted(einsum.result, _BATCH))
    if min(m, n, k) <= 1 or (batch > 1 and m * n * k <= _SMALL_PRODUCT):
        return None
    return Product(m, n, k)


def _reordered_filters(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the filters in oneDNN's order; of a sum in float32, too."""
    is_sum = op.type == "Conv2DBackpropFilter"
    filters = op.outputs[0] if is_sum else op.inputs[1]
    times = 1 if filters.dtype == tf.float32 or not is_sum else 3
    return times * _bytes(filters, dims)


def _gemm_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the blocks of oneDNN's product of float32.

    Measured with AVX-512, 1 to 14 MB in 92 products: those of the second operand, each
    thread's if there are rows for all, and 1 MB of the first one.
    """
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


_PACKS: Mapping[str, tuple[BlockRule, Rule | None]] = {
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
    "LRN": lambda op, dims: _bytes(op.outputs[0], dims),
    "SoftmaxCrossEntropyWithLogits": _first_input,
}
"""Eigen's own kernels, with oneDNN, too, and copies that they take from malloc."""
