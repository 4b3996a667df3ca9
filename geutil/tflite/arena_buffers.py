"""The buffers of an arena, and the place that each gets while it is alive.

Two buffers that are alive at once must not overlap; the arena is as large as the end of
the last one. This is dynamic storage allocation, which is hard to solve exactly, so
interpreters of TFLite files place the largest buffer first (Pisarchyk and Lee 2020,
"greedy by size"). What is computed here is what they do, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from geutil.errors import PlanError

Fit = Literal["tightest", "first"]
"""Which gap a buffer gets: the one that leaves least, or the first."""


class ArenaBuffer(NamedTuple):
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
    buffers: Sequence[ArenaBuffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> list[int]:
    """Return the offset of each buffer: the largest is placed first.

    Of buffers of one size, the one that is alive first comes first, where gaps are
    chosen by how little they leave; where the first gap is taken, the one that is given
    last. TensorFlow Lite does the former, with an alignment of 64 bytes, and
    TensorFlow Lite for Microcontrollers the latter, with 16.

    Example:
        >>> ends = [(0, 1, 100), (1, 2, 300), (2, 3, 50)]
        >>> a, b, c = [ArenaBuffer(*end) for end in ends]
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
    buffers: Sequence[ArenaBuffer], *, alignment: int = 64, fit: Fit = "tightest"
) -> int:
    """Return the bytes of the arena in which buffers are placed greedily.

    Args:
        buffers: in any order.
        alignment: as of `greedy_offsets`.
        fit: likewise.

    Cost: that of `greedy_offsets`.

    Example:
        >>> ends = [(0, 1, 100), (1, 2, 300), (2, 3, 50)]
        >>> arena_bytes([ArenaBuffer(*end) for end in ends])
        420
    """
    offsets = greedy_offsets(buffers, alignment=alignment, fit=fit)
    ends = (o + b.size for o, b in zip(offsets, buffers, strict=True))
    end = max(ends, default=0)
    return _aligned(end, alignment) if fit == "first" else end


def alive_bytes(buffers: Sequence[ArenaBuffer], steps: int) -> list[int]:
    """Return how many bytes are alive in each step: no arena is smaller than the most.

    Example:
        >>> alive_bytes([ArenaBuffer(0, 1, 100), ArenaBuffer(1, 2, 300)], 3)
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


class Value(NamedTuple):
    """What operations make, read, and share one buffer for.

    Attributes:
        size: in bytes.
        maker: the first operation that writes it; -1 if it is there from the start,
            which takes no memory if nothing uses or keeps it.
        users: the others that read it or write into it.
        is_kept: whether it is alive to the end.
    """

    size: int
    maker: int
    users: tuple[int, ...] = ()
    is_kept: bool = False


@dataclass(frozen=True)
class ArenaProgram:
    """Operations, numbered in an order in which they can run, and what they make.

    Attributes:
        count: how many operations there are.
        values: what they make and read.
        temporaries: for each operation, the bytes of buffers that are alive only while
            it runs.
        after: pairs (earlier, later) of operations that must keep this order besides:
            the later one reads what the earlier one wrote into a shared buffer, say.
    """

    count: int
    values: Sequence[Value]
    temporaries: Sequence[Sequence[int]] = ()
    after: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for before, behind in self.edges:
            if before >= behind:
                raise PlanError(
                    f"operation {behind} runs before {before}, whose result it needs; "
                    "number them in an order in which they can run"
                )

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs (earlier, later) of operations: by values, and given ones."""
        pairs = dict.fromkeys(self.after)
        for value in self.values:
            if value.maker >= 0:
                pairs.update(dict.fromkeys((value.maker, u) for u in value.users))
        return list(pairs)

    @cached_property
    def before(self) -> list[list[int]]:
        """For each operation, those that must run before it."""
        before: list[list[int]] = [[] for _ in range(self.count)]
        for earlier, later in self.edges:
            before[later].append(earlier)
        return before

    @cached_property
    def behind(self) -> list[list[int]]:
        """For each operation, those that must run behind it."""
        behind: list[list[int]] = [[] for _ in range(self.count)]
        for earlier, later in self.edges:
            behind[earlier].append(later)
        return behind

    def buffers(self, order: Sequence[int]) -> list[ArenaBuffer]:
        """Return the buffers of an order: of the values, then the temporary ones."""
        place = [0] * self.count
        for step, i in enumerate(order):
            place[i] = step
        end = self.count - 1
        buffers = []
        for value in self.values:
            first = place[value.maker] if value.maker >= 0 else 0
            last = max((place[u] for u in value.users), default=first)
            last = end if value.is_kept else last
            stays = value.is_kept and not first
            is_needed = value.maker >= 0 or value.is_kept or bool(value.users)
            buffers.append(ArenaBuffer(first, last, is_needed * value.size, stays))
        for i, sizes in enumerate(self.temporaries):
            buffers += [ArenaBuffer(place[i], place[i], size) for size in sizes]
        return buffers

    def alive(self, order: Sequence[int]) -> list[int]:
        """Return how many bytes are alive in each step of an order."""
        return alive_bytes(self.buffers(order), self.count)

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that are alive at once in an order."""
        return max(self.alive(order), default=0)


def _turns(buffers: Sequence[ArenaBuffer], sizes: Sequence[int], fit: Fit) -> list[int]:
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
