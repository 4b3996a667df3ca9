"""The allocator of a device: the chunks that it hands out for the buffers of a step."""

# TensorFlow's best-fit allocator (bfc_allocator.cc) is that of GPUs. It takes the
# smallest free chunk that is large enough, and splits off the rest only where that is
# at least as large as the request. A step therefore takes more than the sum of its
# buffers: 0 to 12 % more on an H100.

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Chunks are multiples of so many bytes (`kMinAllocationSize`)."""
_BINS = 21
"""The bins of free chunks by size, each for twice the one before (`kNumBins`)."""
_LARGEST_REST = 128 << 20
"""A rest as large is always split off (`kDefaultMaxInternalFragmentation`)."""
_FIRST_REGION = 2 << 20
"""The first region of memory that grows (the constructor of `BFCAllocator`)."""
# More bytes than any device has.
_UNLIMITED = 1 << 50


@dataclass(frozen=True)
class Allocator:
    """The rules by which a device hands out its memory: best fit with coalescing."""

    # Growing memory (`set_memory_growth`) is regions that nothing joins, each at least
    # twice the one before; else one region is taken at the start.
    grows: bool = False


class Chunks:
    """The memory of a device while buffers come and go."""

    # `extent` is where the highest chunk ended, or of growing memory all regions'
    # bytes.

    def __init__(self, allocator: Allocator) -> None:
        self.in_use = self.extent = 0
        self._grows = allocator.grows
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(_BINS)]
        self._free: dict[int, _Chunk] = {}
        self._next_region = _FIRST_REGION
        if not self._grows:
            self._add_free(_Chunk(0, _UNLIMITED))

    def allocate(self, size: int) -> _Chunk:
        """Return a chunk of at least `size` bytes."""
        rounded = max(rounded_up(size), ALIGNMENT)
        chunk = self._smallest(rounded) or self._region_for(rounded)
        rest = chunk.size - rounded
        if rest >= min(rounded, _LARGEST_REST):
            after = chunk.after
            end = _Chunk(chunk.address + rounded, rest, before=chunk, after=after)
            if after is not None:
                after.before = end
            chunk.size, chunk.after = rounded, end
            self._add_free(end)
        chunk.is_free = False
        self.in_use += chunk.size
        # Growing memory counts whole regions, when they are added.
        if not self._grows:
            self.extent = max(self.extent, chunk.address + chunk.size)
        return chunk

    def free(self, chunk: _Chunk) -> None:
        """Take a chunk back and join it with free neighbours."""
        self.in_use -= chunk.size
        after, before = chunk.after, chunk.before
        if after is not None and after.is_free:
            self._remove_free(after)
            chunk.join(after)
        if before is not None and before.is_free:
            self._remove_free(before)
            before.join(chunk)
            chunk = before
        self._add_free(chunk)

    def _smallest(self, size: int) -> _Chunk | None:
        """Return the smallest free chunk of at least `size` bytes, no longer free."""
        for chunks in self._bins[_bin_of(size) :]:
            at = bisect_left(chunks, (size, 0))
            if at < len(chunks):
                return self._free.pop(chunks.pop(at)[1])
        return None

    def _region_for(self, size: int) -> _Chunk:
        """Add a region to growing memory, for a chunk of `size` bytes."""
        is_usual = size <= self._next_region
        while size > self._next_region:
            self._next_region *= 2
        # Nothing joins regions: a chunk has no neighbour in another one.
        region = _Chunk(self.extent, self._next_region)
        self.extent += region.size
        if is_usual:
            self._next_region *= 2
        return region

    def _add_free(self, chunk: _Chunk) -> None:
        chunk.is_free = True
        insort(self._bins[_bin_of(chunk.size)], (chunk.size, chunk.address))
        self._free[chunk.address] = chunk

    def _remove_free(self, chunk: _Chunk) -> None:
        chunks = self._bins[_bin_of(chunk.size)]
        del chunks[bisect_left(chunks, (chunk.size, chunk.address))]
        del self._free[chunk.address]


def rounded_up(size: int) -> int:
    """Return the bytes of a chunk that nothing is left over of."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Chunk:
    """A part of a region, between its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "size")

    def __init__(
        self,
        address: int,
        size: int,
        before: _Chunk | None = None,
        after: _Chunk | None = None,
    ) -> None:
        self.address, self.size = address, size
        self.before, self.after = before, after
        self.is_free = True

    def join(self, after: _Chunk) -> None:
        """Take in the chunk behind this one."""
        self.size += after.size
        self.after = after.after
        if after.after is not None:
            after.after.before = self


def _bin_of(size: int) -> int:
    return min((size // ALIGNMENT).bit_length() - 1, _BINS - 1)


@dataclass(frozen=True)
class Taken:
    """The memory of a device in a step."""

    # `in_use`: the bytes of chunks after each op has allocated, before it frees.

    in_use: Sequence[int]
    extent: int


def replay(
    allocator: Allocator,
    always: Iterable[int],
    moves: Iterable[tuple[Sequence[tuple[int, int]], Sequence[int]]],
) -> Taken:
    """Return the memory of a device in a step, besides buffers `always` there."""
    # `moves`: for each op in turn, the buffers that it allocates, as pairs of a key and
    # bytes, and the keys of those that are freed when it has run.
    chunks = Chunks(allocator)
    for size in filter(None, always):
        chunks.allocate(size)
    before = chunks.in_use
    taken: dict[int, _Chunk] = {}
    in_use: list[int] = []
    for made, freed in moves:
        for key, size in made:
            taken[key] = chunks.allocate(size)
        in_use.append(chunks.in_use - before)
        for key in freed:
            chunks.free(taken.pop(key))
    return Taken(in_use, chunks.extent)
