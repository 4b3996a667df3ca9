"""Buffers of a program over time, and the chunks that an allocator hands out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from geutil.memory.program import Allocator, Node, Program, Ran, phases_of
from geutil.memory.timeline import Lifetime, LiveTensor, Moment, Timeline


class Buffers:
    """The buffers alive while nodes start and end, maybe several at once."""

    # A tensor has a buffer of its own, or that of an input: always (`Node.aliases`), or
    # if nobody else is to read it (`Node.reuses`). It lives until the last reader of
    # all tensors in it has ended, a fetched one to the end. A variable that is updated
    # while its old buffer is still to be read has a second one until that was read.

    def __init__(self, program: Program) -> None:
        count = len(program.sizes)
        self._program, self._nodes, self._sizes = program, program.nodes, program.sizes
        self._order: list[int] = []
        self._levels: list[int] = []
        # How often each tensor is read. The caller reads last, so that nothing frees
        # fetched tensors.
        self.reads = [0] * count
        for tensor in chain(program.fetched, *(node.inputs for node in program.nodes)):
            self.reads[tensor] += 1
        # The tensor for which the buffer of each tensor was made.
        self.buffer = list(range(count))
        # For each buffer, how many reads are still to come.
        self.holders = [0] * count
        self._waits: dict[int, int] = {}
        self._awaiting: dict[int, list[int]] = {}
        self._unread: dict[int, list[int]] = {}
        self._step = -1
        # The bytes that are alive now.
        self.held = 0
        # For each tensor, at which start its buffer was made, -1 where it shares
        # another tensor's or is not there yet; and last alive, -1 if it still is.
        self.born = [-1] * count
        self.freed = [-1] * count

    def shared(self, node: Node) -> list[tuple[int, int]]:
        """Return the outputs that get no buffer of their own, each with its buffer."""
        pairs: list[tuple[int, int]] = []
        inputs, outputs, buffer = node.inputs, node.outputs, self.buffer
        for out, place in node.aliases:
            pairs.append((outputs[out], buffer[inputs[place]]))
        sizes, holders = self._sizes, self.holders
        for out, place in node.reuses:
            tensor, source = outputs[out], buffer[inputs[place]]
            # The one read that is to come is this node's.
            if (
                holders[source] == 1
                and sizes[source] == sizes[tensor]
                and not any(tensor == t or source == b for t, b in pairs)
            ):
                pairs.append((tensor, source))
        return pairs

    def start(self, i: int) -> list[tuple[int, int]]:
        """Allocate a node's outputs and scratch; return those that share a buffer."""
        self._step += 1
        sizes, reads, holders = self._sizes, self.reads, self.holders
        node = self._nodes[i]
        outputs = node.outputs
        pairs = self.shared(node) if node.aliases or node.reuses else []
        for tensor, source in pairs:
            self.buffer[tensor] = source
            holders[source] += reads[tensor]
        # The first output is the new value, with a buffer only beside the old one.
        if node.updates:
            self._renew(node)
            outputs = outputs[1:]
        unread = []
        for tensor in outputs:
            if self.buffer[tensor] == tensor:
                self.born[tensor] = self._step
                self.held += sizes[tensor]
                holders[tensor] = reads[tensor]
                # An output without a reader lives as long as its node runs.
                if not reads[tensor]:
                    unread.append(tensor)
        if unread:
            self._unread[i] = unread
        self.held += node.temporary
        self._order.append(i)
        self._levels.append(self.held)
        return pairs

    def end(self, i: int) -> None:
        """Free the temporary bytes of a node, and the buffers that it read last."""
        node = self._nodes[i]
        holders, buffer = self.holders, self.buffer
        self.held -= node.temporary
        unread = self._unread.pop(i, None) or []
        for tensor in node.inputs:
            source = buffer[tensor]
            holders[source] -= 1
            if not holders[source]:
                unread.append(source)
                # A variable has its one buffer again once its old value was read.
                for renewed in self._awaiting.pop(source, ()):
                    self._waits[renewed] -= 1
                    if not self._waits[renewed]:
                        unread.append(renewed)
        for tensor in unread:
            self.freed[tensor] = self._step
            self.held -= self._sizes[tensor]

    def run(self, i: int) -> list[tuple[int, int]]:
        """Start and end a node; return its outputs that share a buffer, with that."""
        shared = self.start(i)
        self.end(i)
        return shared

    def simulation(self) -> Simulation:
        """Return the simulation of all nodes that were started."""
        for tensor, born in enumerate(self.born):
            if born >= 0 and self.freed[tensor] < 0:
                # It lived to the end.
                self.freed[tensor] = self._step
        order, levels = self._order, self._levels
        return Simulation(self._program, order, levels, self.born, self.freed)

    def growth(self, i: int) -> int:
        """Return how many bytes more are alive once a node has run."""
        node = self._nodes[i]
        sizes, reads, holders = self._sizes, self.reads, self.holders
        pairs = self.shared(node) if node.aliases or node.reuses else ()
        shared = {tensor for tensor, _ in pairs}
        # A buffer that an output takes over lives on with the readers of that.
        passed_on = {source for tensor, source in pairs if reads[tensor]}
        growth = 0
        for tensor in node.outputs:
            # An output that nobody reads is gone when the node has run.
            if reads[tensor] and tensor not in shared:
                growth += sizes[tensor]
        if node.updates and any(holders[self.buffer[t]] for t in node.updates):
            growth += sizes[node.outputs[0]]
        # A node may read a buffer several times: all reads left have to be its own.
        counts: dict[int, int] = {}
        for tensor in node.inputs:
            source = self.buffer[tensor]
            counts[source] = counts.get(source, 0) + 1
        for source, count in counts.items():
            if holders[source] == count and source not in passed_on:
                growth -= sizes[source]
        return growth

    def still_read(self, i: int, readers: Collection[int]) -> Iterator[int]:
        """Yield old buffers of variables that a node updates and others are to read."""
        buffer, nodes = self.buffer, self._nodes
        for source in {buffer[tensor] for tensor in nodes[i].updates}:
            own = sum(buffer[t] == source for j in readers for t in nodes[j].inputs)
            if self.holders[source] > own:
                yield source

    def _renew(self, node: Node) -> None:
        """Allocate a new buffer for a variable whose old one is still to be read."""
        renewed = node.outputs[0]
        for old in dict.fromkeys(self.buffer[tensor] for tensor in node.updates):
            if self.holders[old]:
                self._awaiting.setdefault(old, []).append(renewed)
                self._waits[renewed] = self._waits.get(renewed, 0) + 1
        if self._waits.get(renewed):
            self.born[renewed] = self._step
            self.held += self._sizes[renewed]


@dataclass(frozen=True)
class Simulation:
    """The buffers of a program over time. A step is an index into `order`.

    Attributes:
        program: the program that was run.
        order: the nodes, by number, in the order in which they ran.
        held: the most bytes that are held while each step's node runs.
        born: for each tensor the step that allocated its buffer, or -1 where it shares
            another tensor's buffer or was never made.
        freed: for each tensor the last step that held its buffer.
    """

    program: Program
    order: Sequence[int]
    held: Sequence[int]
    born: Sequence[int]
    freed: Sequence[int]

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return max(self.held, default=0)

    @property
    def resident(self) -> int:
        """The most bytes of memory in use at once.

        Whole chunks where the device's allocator hands out chunks, and the bytes that
        kernels take outside it.
        """
        nodes = self.program.nodes
        pairs = zip(self.order, self.chunks, strict=True)
        return max((size + nodes[i].packed for i, size in pairs), default=0)

    def fullest(self) -> tuple[Node, list[LiveTensor]]:
        """Return the node that runs when most is taken, and all that is, by size."""
        ran, chunks = [self.program.nodes[i] for i in self.order], self.chunks
        step = max(range(len(ran)), key=lambda step: chunks[step] + ran[step].packed)
        node = ran[step]
        buffers = [live_tensor(self.program, t) for t in self.alive(step)]
        packed = LiveTensor(f"{node.name} (packed)", node.type, node.packed)
        own = [part for part in (live_scratch(node), packed) if part.bytes]
        return node, sorted([*buffers, *own], key=lambda part: -part.bytes)

    @property
    def extent(self) -> int | None:
        """The bytes of a region with room for the chunks and the variables.

        None where the device has no allocator of chunks. Memory that grows by regions
        needs about as much, and at least the bytes in use.
        """
        allocator = self.program.device.allocator
        if allocator is None:
            return None
        in_use = max(self._replay(allocator).in_use, default=0)
        least = in_use + self.program.variable_bytes
        return max(self._replay(Allocator()).extent, least)

    @property
    def chunks(self) -> Sequence[int]:
        """The bytes in chunks at each step; without chunks, the bytes held."""
        allocator = self.program.device.allocator
        return self.held if allocator is None else self._replay(allocator).in_use

    def _replay(self, allocator: Allocator) -> Taken:
        nodes, sizes = self.program.nodes, self.program.sizes
        made: list[list[tuple[int, int]]] = [[] for _ in self.order]
        freed: list[list[int]] = [[] for _ in self.order]
        for t, (born, last) in enumerate(zip(self.born, self.freed, strict=True)):
            if born >= 0 and sizes[t]:
                made[born].append((t, sizes[t]))
                freed[last].append(t)
        for step, node in enumerate(nodes[i] for i in self.order):
            if node.temporary:
                made[step].append((-1, node.temporary))
                # A kernel frees its scratch before the executor lets go of its inputs.
                freed[step].insert(0, -1)
        moves = zip(made, freed, strict=True)
        always = self.program.variables or (self.program.variable_bytes,)
        return replay(allocator, always, moves)

    def alive(self, step: int) -> list[int]:
        """Return the tensors whose buffers are held at a step, largest first."""
        sizes = self.program.sizes
        spans = enumerate(zip(self.born, self.freed, strict=True))
        alive = [t for t, (b, f) in spans if 0 <= b <= step <= f and sizes[t]]
        return sorted(alive, key=lambda tensor: -sizes[tensor])

    def timeline(self, source: str = "predicted") -> Timeline:
        """Return the simulation with names instead of numbers."""
        program, nodes = self.program, self.program.nodes
        lives = self._lifetimes()
        peak = max(range(len(self.order)), key=self.held.__getitem__, default=-1)
        at_peak = [life.tensor for life in lives if life.first <= peak <= life.last]
        needs = program.needs()
        place = {i: step for step, i in enumerate(self.order)}
        # Nodes go by their number in the program, phases by the place in the order.
        phases = phases_of(
            Ran(
                nodes[i].name,
                nodes[i].type,
                [place[j] for j in needs[i]],
                sum(program.sizes[t] for t in nodes[i].outputs),
            )
            for i in self.order
        )
        named = (nodes[i].name for i in self.order)
        return Timeline(
            moments=tuple(map(Moment, named, self.held, phases)),
            at_peak=tuple(sorted(at_peak, key=lambda live: -live.bytes)),
            variable_bytes=program.variable_bytes,
            constant_bytes=program.constant_bytes,
            source=source,
            lifetimes=tuple(sorted(lives, key=lambda life: life.first)),
            resident=self.resident,
            extent=self.extent,
        )

    def _lifetimes(self) -> list[Lifetime]:
        """Return all buffers by their tensors, then the temporary ones."""
        program, nodes = self.program, self.program.nodes
        spans = enumerate(zip(self.born, self.freed, strict=True))
        lives = [
            Lifetime(live_tensor(program, t), nodes[self.order[born]].name, born, freed)
            for t, (born, freed) in spans
            if born >= 0 and program.sizes[t]
        ]
        for step, node in enumerate(nodes[i] for i in self.order):
            if node.temporary:
                lives.append(Lifetime(live_scratch(node), node.name, step, step))
        return lives


def live_tensor(program: Program, tensor: int) -> LiveTensor:
    """Return a tensor of a program by name."""
    node = program.nodes[program.makers[tensor]]
    place = list(node.outputs).index(tensor)
    return LiveTensor(f"{node.name}:{place}", node.type, program.sizes[tensor])


def live_scratch(node: Node) -> LiveTensor:
    """Return the temporary bytes of a node."""
    return LiveTensor(f"{node.name} (temporary)", node.type, node.temporary)


@dataclass(frozen=True)
class ProgramBuffer:
    """Memory of a tensor, held from when a node starts until others have ended."""

    tensor: int
    bytes: int
    maker: int
    # The nodes of which the last one to end frees it. No order of the program has any
    # other reader after all of these. Empty if it is held to the end.
    last: tuple[int, ...]
    # If there are several, a node that starts only after all of these have ended.
    gone: int | None = None


def buffers_of(program: Program) -> list[ProgramBuffer]:
    """Return the buffers of a program that it has under every schedule."""
    # Tensors share a buffer if they do so under every schedule: an op that forwards its
    # input, or one that takes over a buffer which nobody else can still hold then. A
    # buffer that might be taken over counts as a new one, so no schedule holds more
    # than these buffers do. Cost: quadratic in nodes, a bit for each pair.
    before = program.needs()
    try:
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError as error:
        raise program.waits_forever(min(error.args[1])) from error
    buffers = _AnyOrder(program).buffers(_ancestors(before, order))
    return _with_ends(buffers, before, order)


def _ancestors(
    before: Sequence[set[int]], order: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Yield the nodes in an order, each with all those before it as bits."""
    readers = [0] * len(before)
    for i in (j for made in before for j in made):
        readers[i] += 1
    bits: dict[int, int] = {}
    for i in order:
        behind = 0
        for j in before[i]:
            behind |= bits[j] | 1 << j
            readers[j] -= 1
            if not readers[j]:
                # Nobody asks for it again.
                del bits[j]
        if readers[i]:
            bits[i] = behind
        yield i, behind


@dataclass
class _Shared:
    """Tensors of one buffer, made for the first, and who reads them so far."""

    tensor: int
    # How many nodes are still to come that read one of them.
    left: int
    fetched: bool
    # The readers that came and that no later one comes after.
    last: list[int] = field(default_factory=list)


class _AnyOrder:
    """Goes through the nodes of a program once, in a topological order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        fetched = frozenset(program.fetched)
        self._readers = [len(set(numbers)) for numbers in program.readers()]
        self._shared = [
            _Shared(t, left, t in fetched) for t, left in enumerate(self._readers)
        ]
        # The bits of nodes that change variables, and of those that read these.
        self._behind: dict[int, int] = {}
        updated = [t for node in program.nodes for t in node.updates]
        self._reads = {program.makers[t] for t in updated}

    def buffers(self, ancestors: Iterable[tuple[int, int]]) -> list[ProgramBuffer]:
        """Return the buffers, in the order of their tensors."""
        for i, behind in ancestors:
            node = self._program.nodes[i]
            if node.updates or i in self._reads:
                self._behind[i] = behind
            self._visit(i, node, behind)
        buffers = [*self._made(), *self._renewed()]
        return sorted(buffers, key=lambda buffer: buffer.tensor)

    def _visit(self, i: int, node: Node, behind: int) -> None:
        """Note the reads of a node, and the buffers that its outputs share."""
        of = [self._shared[t] for t in node.inputs]
        read = list({id(shared): shared for shared in of}.values())
        for shared in read:
            here = {t for t in node.inputs if self._shared[t] is shared}
            shared.left -= len(here)
            # A node that runs before this one in any order cannot be the last reader.
            shared.last = [j for j in shared.last if not behind >> j & 1]
        met: dict[int, _Shared] = {}
        for out, place in node.aliases:
            met[node.outputs[out]] = of[place]
            self._join(node.outputs[out], of[place])
        # A kernel may write into an input only if nothing else needs the buffer, in
        # whatever order the nodes run.
        sizes = self._program.sizes
        for out, place in node.reuses:
            tensor, shared = node.outputs[out], of[place]
            as_large = sizes[tensor] == sizes[shared.tensor]
            once = sum(other is shared for other in of) == 1
            is_needed = shared.left or shared.last or shared.fetched
            is_met = tensor in met or any(other is shared for other in met.values())
            if as_large and once and not is_needed and not is_met:
                met[tensor] = shared
                self._join(tensor, shared)
        for shared in read:
            shared.last.append(i)

    def _join(self, tensor: int, shared: _Shared) -> None:
        """Let a new tensor share a buffer."""
        shared.left += self._readers[tensor]
        shared.fetched = shared.fetched or self._shared[tensor].fetched
        self._shared[tensor] = shared

    def _made(self) -> Iterator[ProgramBuffer]:
        renewed = {n.outputs[0] for n in self._program.nodes if n.updates}
        for tensor, maker in self._program.makers.items():
            size, shared = self._program.sizes[tensor], self._shared[tensor]
            if size and tensor not in renewed and shared.tensor == tensor:
                # A fetched tensor stays; one without a reader goes with its maker.
                last = () if shared.fetched else tuple(shared.last) or (maker,)
                yield ProgramBuffer(tensor, size, maker, last)

    def _renewed(self) -> Iterator[ProgramBuffer]:
        """Yield the new buffers of variables whose old ones may still be read."""
        for i, node in enumerate(self._program.nodes):
            if not node.updates or not self._program.sizes[node.outputs[0]]:
                continue
            ended = self._behind[i] | 1 << i
            late = {
                j
                for t in node.updates
                # Reads after the update are of the new buffer.
                if not self._behind[self._program.makers[t]] >> i & 1
                for j in self._shared[t].last
                if not ended >> j & 1
            }
            if late:
                tensor = node.outputs[0]
                size = self._program.sizes[tensor]
                yield ProgramBuffer(tensor, size, i, tuple(sorted(late)))


def _with_ends(
    buffers: list[ProgramBuffer], before: Sequence[set[int]], order: Sequence[int]
) -> list[ProgramBuffer]:
    """Return buffers, those with several last readers with the node that follows."""
    position = {i: place for place, i in enumerate(order)}
    masks_behind: dict[int, dict[int, int]] = {}
    for place, buffer in enumerate(buffers):
        if len(buffer.last) > 1:
            # Only a node that comes after the latest reader can depend on all of them.
            latest = max(buffer.last, key=position.__getitem__)
            mask = sum(1 << i for i in buffer.last)
            masks_behind.setdefault(latest, {})[place] = mask
    waiting: dict[int, int] = {}
    for i, behind in _ancestors(before, order):
        for place in [p for p, mask in waiting.items() if behind & mask == mask]:
            buffers[place] = replace(buffers[place], gone=i)
            del waiting[place]
        waiting |= masks_behind.get(i, {})
    return buffers


# TensorFlow's best-fit allocator (bfc_allocator.cc) is that of GPUs. It takes the
# smallest free chunk that is large enough, and splits off the rest only where that is
# at least as large as the request. A step therefore takes more than the sum of its
# buffers: 0 to 12 % more on an H100.

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
