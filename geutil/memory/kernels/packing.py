"""Memory that CPU kernels take outside TensorFlow's allocator, from malloc.

Eigen copies blocks of both operands of a product so that a core reads them in a row;
the kernels of MatMul and of convolutions without oneDNN take these copies from malloc.
A product's result has `n` rows of `m` columns, and `k` terms are summed up: Eigen sees
the rows of TensorFlow as columns. Its left operand is the second one here, `k` by `m`.
"""

# How large the blocks are follows from the caches and the threads, by rules that are
# read off the headers that TensorFlow 2.21 comes with (TensorContractionThreadPool.h,
# GeneralBlockPanelKernel.h, eigen_contraction_kernel.h), for x86; each size was
# compared with malloc's log in 100 products, and the sums with the resident set.

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from geutil.graph.types import Operation, dims_of
from geutil.memory.kernels import cpu
from geutil.memory.kernels.cpu import DimsOf, Rule
from geutil.memory.sizes import dtype_bytes

_REGISTERS = 16
"""Rows of the left operand that the innermost loop takes (AVX)."""
_COLUMNS = 4
"""Columns of the right operand that it takes."""
_OWN_CACHE = 3 << 19
"""The cache that one thread alone is assumed to have, in bytes."""
_SMALL_PRODUCT = 128 * 128
"""Multiplications in a product of a batch that one thread does alone."""


class Caches(NamedTuple):
    """The bytes of a processor's caches: first and second of a core, third of all."""

    first: int = 32 << 10
    second: int = 256 << 10
    third: int = 2 << 20


@cache
def caches_here() -> Caches:
    """Return the caches of this machine; those that Eigen assumes if none are known."""
    sizes = list(Caches())
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
    return Caches(*sizes)


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
    takes = cpu.runs_in_onednn if "Backprop" in op.type else cpu.takes_type
    if takes(op, onednn):
        return with_onednn(op, dims) if with_onednn else 0
    return with_eigen(op, dims)


class Product(NamedTuple):
    """A product of matrices: `m` columns and `n` rows of sums of `k` terms."""

    m: int
    n: int
    k: int
    # The bytes of an element.
    each: int = 4
    # True where the left and the right operand (the second and the first of a MatMul)
    # lie in memory as Eigen would pack them, but for the gaps.
    plain: tuple[bool, bool] = (False, False)


def _packed(product: Product) -> int:
    """Return the bytes of a product's blocks in this process, on this machine."""
    return product_bytes(product, cpu.threads_of_ops(), caches_here())


def product_bytes(product: Product, threads: int, caches: Caches) -> int:
    """Return the bytes of the blocks that Eigen packs for a product."""
    # Those that it writes: malloc returns more, which no page of memory is needed for.
    m, n, k, each, plain = product
    if min(product[:4]) <= 0 or n == 1:
        return 0
    if threads > 1 and _shards_terms(product, threads, caches):
        part = Product(m, n, -(-k // threads), each)
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


def _shards_terms(product: Product, threads: int, caches: Caches) -> bool:
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
    product: Product, threads: int, caches: Caches, by_columns: bool
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
    m: int, n: int, k: int, each: int, threads: int, caches: Caches
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
    m: int, n: int, k: int, each: int, _: int, caches: Caches
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
    return [cpu.sizes_at(t, dims) for t in tensors]


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
    product = Product(
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
    columns = cpu.columns_of(op, dims)
    if not columns:
        return 0
    _, patch, depth, each, images = columns
    terms = min(columns.cached, images or columns.cached) * columns.pixels
    blocks = _packed(Product(depth, patch, terms, each))
    return patch * depth * each + blocks - columns.untouched


def _image_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropInput: blocks of one image's product."""
    columns = cpu.columns_of(op, dims)
    if not columns:
        return 0
    if not columns.are_single(cpu.threads_of_ops()):
        return -columns.untouched
    pixels, patch, depth, each, _ = columns
    return _packed(Product(patch, pixels, depth, each))


def _volume_filter_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv3DBackpropFilterV2: all operands in another order."""
    shapes = _known(op, dims)
    if shapes is None:
        return 0
    image, gradient, filters = shapes[0], shapes[2], shapes[-1]
    each = dtype_bytes(op.outputs[0].dtype)
    rows, width = math.prod(filters) // (filters[3] or 1), filters[3]
    product = Product(width, rows, math.prod(gradient[:4]), each)
    copies = sum(map(math.prod, (image, gradient, filters)))
    return copies * each + _packed(product)


def _matrix_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a product of matrices, or of one after the other."""
    product = _einsum_product(op, dims) if op.type == "Einsum" else _product(op, dims)
    return _packed(product) if product else 0


def _product(op: Operation, dims: DimsOf) -> Product | None:
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
    return Product(m, n, k, each, plain)


def _einsum_product(op: Operation, dims: DimsOf) -> Product | None:
    """Return the product of matrices that an Einsum comes to."""
    einsum = cpu.EinsumLabels(op, dims)
    if not einsum.terms:
        return None
    left, right = einsum.terms
    m = einsum.elements(einsum.sorted(right, cpu.FREE))
    n = einsum.elements(einsum.sorted(left, cpu.FREE))
    k = einsum.elements(einsum.sorted(left, cpu.CONTRACTED))
    batch = einsum.elements(einsum.sorted(einsum.result, cpu.BATCH))
    if min(m, n, k) <= 1 or (batch > 1 and m * n * k <= _SMALL_PRODUCT):
        return None
    return Product(m, n, k)


def _reordered_filters(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the filters in oneDNN's order; of a sum in float32, too."""
    is_sum = op.type == "Conv2DBackpropFilter"
    filters = op.outputs[0] if is_sum else op.inputs[1]
    times = 1 if filters.dtype == tf.float32 or not is_sum else 3
    return times * cpu.bytes_at(filters, dims)


def _gemm_blocks(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the blocks of oneDNN's product of float32."""
    # Measured with AVX-512, 1 to 14 MB in 92 products: those of the second operand,
    # each thread's if there are rows for all, and 1 MB of the first one.
    product = _product(op, dims)
    if op.outputs[0].dtype != tf.float32 or product is None:
        return 0
    if product.m < 768 or product.n < 512 or product.m * product.n < 1 << 19:
        return 0
    times = cpu.threads_of_ops() if product.n >= product.m else 1
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
    "LRN": lambda op, dims: cpu.bytes_at(op.outputs[0], dims),
    "SoftmaxCrossEntropyWithLogits": cpu.first_input,
}
"""Eigen's own kernels, with oneDNN, too, and copies that they take from malloc."""
