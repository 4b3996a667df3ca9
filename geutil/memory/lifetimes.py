"""The buffers of a program under any schedule, and what ends the life of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from geutil.errors import PredictionError
from geutil.memory.program import Node, Program


@dataclass(frozen=True)
class Buffer:
    """Memory that is held from when a node starts until others have ended.

    Attributes:
        tensor: the tensor that it is made for.
        bytes: its size.
        maker: the node that makes it.
        last: the nodes of which the last one to end frees it. No order of the program
            has any other reader after all of these. Empty if it is held to the end.
        gone: if there are several last nodes, one that starts only after all of these
            have ended; None if there is none.
    """

    tensor: int
    bytes: int
    maker: int
    last: tuple[int, ...]
    gone: int | None = None


def buffers_of(program: Program) -> list[Buffer]:
    """Return the buffers of a program, as they are whatever the schedule.

    Tensors share a buffer if they do so under every schedule: an op that forwards its
    input, or one that takes over a buffer which nobody else can still hold then. What
    might be taken over is taken to be new, so no schedule holds more than these
    buffers do.

    Args:
        program: the nodes and their edges.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: quadratic in nodes with a small factor, a bit for each pair.
    """
    return _Walk(program).buffers()


@dataclass
class _BufferGroup:
    """Tensors of one buffer, and who reads them so far.

    Attributes:
        tensor: the one that it was made for.
        left: how many nodes are still to come that read one of them.
        fetched: whether one of them is held to the end.
        last: the readers that came and that no later one comes after.
    """

    tensor: int
    left: int
    fetched: bool
    last: list[int] = field(default_factory=list)


class _Walk:
    """Goes through the nodes of a program once, in a topological order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fetched = frozenset(program.fetched)
        self._maker = {t: i for i, n in enumerate(program.nodes) for t in n.outputs}
        readers: list[set[int]] = [set() for _ in program.sizes]
        for i, node in enumerate(program.nodes):
            for t in node.inputs:
                readers[t].add(i)
        self._readers = [len(numbers) for numbers in readers]
        self._groups: dict[int, _BufferGroup] = {}
        # The bits of nodes that change variables, and of those that read these.
        self._behind: dict[int, int] = {}
        updates = [n.updates for n in program.nodes if n.updates]
        self._reads = {self._maker[t] for numbers in updates for t in numbers}

    def buffers(self) -> list[Buffer]:
        """Return the buffers, in the order of their tensors."""
        for i, behind in _ancestors(self._program, self._maker):
            node = self._program.nodes[i]
            if node.updates or i in self._reads:
                self._behind[i] = behind
            self._visit(i, node, behind)
        buffers = [*self._made(), *self._renewed()]
        buffers.sort(key=lambda buffer: buffer.tensor)
        return _with_ends(self._program, self._maker, buffers)

    def _visit(self, i: int, node: Node, behind: int) -> None:
        """Take note of what a node reads, and of the buffers that its outputs share."""
        program = self._program
        read = list({id(g): g for g in map(self._group, node.inputs)}.values())
        for group in read:
            read_here = {t for t in node.inputs if self._group(t) is group}
            group.left -= len(read_here)
            # What runs before this node in any order cannot be the last reader.
            group.last = [j for j in group.last if not behind >> j & 1]
        shared = set()
        shared_groups: list[_BufferGroup] = []
        for out, place in node.aliases:
            self._join(node.outputs[out], self._group(node.inputs[place]))
            shared.add(node.outputs[out])
            shared_groups.append(self._group(node.inputs[place]))
        # A kernel may write into an input only if nothing else needs the buffer, in
        # whatever order the nodes run.
        for out, place in node.reuses:
            tensor, group = node.outputs[out], self._group(node.inputs[place])
            as_large = program.sizes[tensor] == program.sizes[group.tensor]
            once = sum(self._group(t) is group for t in node.inputs) == 1
            is_needed = group.left or group.last or group.fetched
            met = tensor in shared or any(g is group for g in shared_groups)
            if as_large and once and not is_needed and not met:
                self._join(tensor, group)
                shared.add(tensor)
                shared_groups.append(group)
        for group in read:
            group.last.append(i)

    def _group(self, tensor: int) -> _BufferGroup:
        group = self._groups.get(tensor)
        if group is None:
            fetched = tensor in self._fetched
            group = _BufferGroup(tensor, self._readers[tensor], fetched)
            self._groups[tensor] = group
        return group

    def _join(self, tensor: int, group: _BufferGroup) -> None:
        """Let a new tensor share a buffer."""
        group.left += self._readers[tensor]
        group.fetched = group.fetched or tensor in self._fetched
        self._groups[tensor] = group

    def _made(self) -> Iterator[Buffer]:
        renewed = {n.outputs[0] for n in self._program.nodes if n.updates}
        for tensor, maker in self._maker.items():
            size = self._program.sizes[tensor]
            group = self._group(tensor)
            if not size or tensor in renewed or group.tensor != tensor:
                continue
            last = () if group.fetched else tuple(group.last) or (maker,)
            yield Buffer(tensor, size, maker, last)

    def _renewed(self) -> Iterator[Buffer]:
        """Yield the new buffers of variables whose old ones may still be read."""
        for i, node in enumerate(self._program.nodes):
            if not node.updates or not self._program.sizes[node.outputs[0]]:
                continue
            ended = self._behind[i] | 1 << i
            late = {
                j
                for t in node.updates
                # What is read after the update is the new buffer.
                if not self._behind[self._maker[t]] >> i & 1
                for j in self._group(t).last
                if not ended >> j & 1
            }
            if late:
                tensor = node.outputs[0]
                size = self._program.sizes[tensor]
                yield Buffer(tensor, size, i, tuple(sorted(late)))


def _with_ends(
    program: Program, maker: dict[int, int], buffers: list[Buffer]
) -> list[Buffer]:
    """Return buffers, those with several last readers with the node that follows."""
    by_reader: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    for place, buffer in enumerate(buffers):
        if len(buffer.last) > 1:
            left[place] = len(buffer.last)
            for i in buffer.last:
                by_reader.setdefault(i, []).append(place)
    masks = {p: sum(1 << i for i in buffers[p].last) for p in left}
    waiting: dict[int, None] = {}
    for i, behind in _ancestors(program, maker):
        for place in [p for p in waiting if behind & masks[p] == masks[p]]:
            buffers[place] = replace(buffers[place], gone=i)
            del waiting[place]
        for place in by_reader.get(i, ()):
            left[place] -= 1
            if not left[place]:
                waiting[place] = None
    return buffers


def _ancestors(program: Program, maker: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the nodes in a topological order, each with those before it as bits."""
    before = [
        {*(maker[t] for t in node.inputs), *node.controls} for node in program.nodes
    ]
    after: list[list[int]] = [[] for _ in before]
    for i, neighbours in enumerate(before):
        for j in neighbours:
            after[j].append(i)
    pending = [len(neighbours) for neighbours in before]
    waiting = [len(neighbours) for neighbours in after]
    behind: dict[int, int] = {}
    order = [i for i, count in enumerate(pending) if not count]
    for i in order:
        bits = 0
        for j in before[i]:
            bits |= behind[j] | 1 << j
            waiting[j] -= 1
            if not waiting[j]:
                # Nobody asks for it again.
                del behind[j]
        behind[i] = bits
        if not waiting[i]:
            del behind[i]
        yield i, bits
        for j in after[i]:
            pending[j] -= 1
            if not pending[j]:
                order.append(j)
    if len(order) < len(before):
        stuck = next(i for i, count in enumerate(pending) if count)
        raise PredictionError(
            f"'{program.nodes[stuck].name}' never becomes ready: it waits for itself, "
            "or for a node that does"
        )
