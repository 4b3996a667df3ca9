"""The blocks that Eigen packs for a product of matrices, allocated by malloc.

Eigen copies blocks of both operands so that a core reads them in a row; the kernels of
MatMul and of convolutions without oneDNN take these copies from malloc. How large the
blocks are follows from the caches and the threads, by rules that are read off the
headers that TensorFlow 2.21 comes with (TensorContractionThreadPool.h,
GeneralBlockPanelKernel.h, eigen_contraction_kernel.h), for x86; each size was compared
with malloc's log in 100 products.

A product's result has `n` rows of `m` columns, and `k` terms are summed up: Eigen sees
the rows of TensorFlow as columns. Its left operand is the second one here, `k` by `m`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_REGISTERS = 16
"""Rows of the left operand that the innermost loop takes (AVX)."""
_COLUMNS = 4
"""Columns of the right operand that it takes."""
_DEPTH = 320
"""The most terms in a block where several threads work."""
_SLICES = 2
"""How many blocks of the depth are packed at once."""
_OWN_CACHE = 3 << 19
"""The cache that one thread alone is assumed to have, in bytes."""
_TASK = 80_000
"""The cycles that a task takes at most if it is of several blocks."""
_DIRECT = 256 << 10
"""Below so many bytes an operand that is read twice is not packed."""


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
        if kind != "Instruction" and known and int(level) <= len(sizes):
            sizes[int(level) - 1] = int(known[1]) << 10
    return Caches(*sizes)


class Product(NamedTuple):
    """A product of matrices: `m` columns and `n` rows of sums of `k` terms."""

    m: int
    n: int
    k: int
    # The bytes of an element.
    each: int = 4
    # Whether the left and the right operand (the second and the first one of a MatMul)
    # lie in memory as Eigen would pack them, but for the gaps.
    plain: tuple[bool, bool] = (False, False)


def product_bytes(product: Product, threads: int, caches: Caches) -> int:
    """Return the bytes of the blocks that Eigen packs for a product.

    Those that it writes: malloc returns more, which no page of memory is needed for.
    """
    m, n, k, each, plain = product
    if min(product[:4]) <= 0:
        return 0
    if n == 1:
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
        slices = min(-(-k // bk), _SLICES)
        left, right = slices * m, slices * n
    # With as many tasks in a row each thread has blocks that it packs again and again.
    grain = max(1, int(_TASK / (bm * bn * (bk * _cycles(bm, bn) + 0.7))))
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
    """Tell whether an operand without gaps is read where it lies, not packed."""
    return whole or times == 1 or (times == 2 and size < _DIRECT)


def _tasks_enough(threads: int) -> float:
    """Return how many tasks for each thread let a thread keep to a row of them."""
    table = ((4, 8.0), (8, 4.0), (16, 2.0), (32, 1.0), (64, 0.8))
    return next((enough for most, enough in table if threads <= most), 0.6)


def _shards_columns(m: int, n: int, threads: int) -> bool:
    """Tell whether threads share the columns of the right operand."""
    nr = _COLUMNS
    of_each = n // threads
    few = of_each < nr
    uneven = of_each < 4 * nr and n % (threads * nr) != 0
    even_rows = m % (threads * nr) == 0 or m // n >= 6
    if m // threads >= nr and (few or (uneven and even_rows)):
        return False
    return not (of_each < 16 * nr and m > n * 32)


def _shards_terms(product: Product, threads: int, caches: Caches) -> bool:
    """Tell whether each thread sums up a part of the terms."""
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
    deepest = max(8, min((caches.first - 4 * mr * nr) // ((mr + nr) * each), _DEPTH))
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
