"""Offsets in an arena: each buffer gets a place for the time in which it is alive.

Two buffers that are alive at once must not overlap; the arena is as large as the end of
the last one. This is dynamic storage allocation, which is hard to solve exactly, so
interpreters of TFLite files place the largest buffer first (Pisarchyk and Lee 2020,
"greedy by size"). What is computed here is what they do, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Fit = Literal["tightest", "first"]
"""Which gap a buffer gets: the one that leaves least, or the first."""


class Buffer(NamedTuple):
    """A buffer and the time in which it is alive.

    Attributes:
        first: the first step in which it is alive.
        last: the last one.
        size: in bytes.
        is_first: whether it is placed before all that are not, whatever its size; not
            looked at where the first gap is taken.
    """

    first: int
    last: int
    size: int
    is_first: bool = False


def greedy_offsets(
    buffers: Sequence[Buffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> list[int]:
    """Return the offset of each buffer: the largest is placed first.

    Of buffers of one size, the one that is alive first comes first, where gaps are
    chosen by how little they leave; where the first gap is taken, the one that is given
    last. TensorFlow Lite does the former, with an alignment of 64 bytes, and
    TensorFlow Lite for Microcontrollers the latter, with 16.

    Args:
        buffers: in any order.
        alignment: offsets are multiples of it, in bytes.
        fit: which gap is taken.

    Cost: for each buffer, those that are alive at the same time, sorted; some 20 us for
        each of a thousand.

    Example:
        >>> a, b, c = Buffer(0, 1, 100), Buffer(1, 2, 300), Buffer(2, 3, 50)
        >>> greedy_offsets([a, b, c])
        [320, 0, 320]
    """
    count = len(buffers)
    first = np.array([b.first for b in buffers], np.int64)
    last = np.array([b.last for b in buffers], np.int64)
    sizes = [b.size for b in buffers]
    if fit == "first":
        sizes = [_aligned(size, alignment) for size in sizes]
    turns = _turns(buffers, sizes, fit)
    offsets = np.zeros(count, np.int64)
    ends = np.zeros(count, np.int64)
    is_placed = np.zeros(count, bool)
    for i in turns:
        if not sizes[i]:
            continue
        alive = np.flatnonzero(is_placed & (first <= last[i]) & (last >= first[i]))
        alive = alive[np.argsort(offsets[alive], kind="stable")]
        pairs = zip(offsets[alive].tolist(), ends[alive].tolist(), strict=True)
        offsets[i] = _gap(list(pairs), sizes[i], alignment, fit)
        ends[i] = offsets[i] + sizes[i]
        is_placed[i] = True
    return [int(offset) for offset in offsets]


def arena_bytes(
    buffers: Sequence[Buffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> int:
    """Return the bytes of the arena in which buffers are placed greedily.

    Args:
        buffers: in any order.
        alignment: as of `greedy_offsets`.
        fit: likewise.

    Cost: that of `greedy_offsets`.

    Example:
        >>> arena_bytes([Buffer(0, 1, 100), Buffer(1, 2, 300), Buffer(2, 3, 50)])
        420
    """
    offsets = greedy_offsets(buffers, alignment=alignment, fit=fit)
    ends = (o + b.size for o, b in zip(offsets, buffers, strict=True))
    end = max(ends, default=0)
    return _aligned(end, alignment) if fit == "first" else end


def alive_bytes(buffers: Sequence[Buffer], steps: int) -> list[int]:
    """Return how many bytes are alive in each step: no arena is smaller than the most.

    Args:
        buffers: in any order.
        steps: how many steps there are.

    Example:
        >>> alive_bytes([Buffer(0, 1, 100), Buffer(1, 2, 300)], 3)
        [100, 400, 300]
    """
    changes = [0] * (steps + 1)
    for buffer in buffers:
        changes[max(buffer.first, 0)] += buffer.size
        changes[min(buffer.last, steps - 1) + 1] -= buffer.size
    alive, total = [], 0
    for change in changes[:steps]:
        total += change
        alive.append(total)
    return alive


def _turns(buffers: Sequence[Buffer], sizes: Sequence[int], fit: Fit) -> list[int]:
    """Return the buffers in the order in which they are placed."""
    numbers = range(len(buffers))
    if fit == "first":
        return sorted(numbers, key=lambda i: (-sizes[i], -i))
    return sorted(
        numbers,
        key=lambda i: (
            (0, 0, i) if buffers[i].is_first else (1, -sizes[i], buffers[i].first, i)
        ),
    )


def _gap(placed: Sequence[tuple[int, int]], size: int, alignment: int, fit: Fit) -> int:
    """Return the offset of a gap, between (offset, end) of what is placed, in order."""
    best, left_by_best, current = None, 0, 0
    for offset, end in placed:
        start = _aligned(current, alignment)
        if start + size <= offset and (best is None or offset - start < left_by_best):
            if fit == "first":
                return start
            # TFLite compares what lies behind alignment with what lay before it.
            best, left_by_best = start, offset - current
        current = max(current, end)
        if best is not None and not left_by_best:
            break
    return _aligned(current, alignment) if best is None else best


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
