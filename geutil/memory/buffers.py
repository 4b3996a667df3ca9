"""The buffers of a program while its nodes run, in whatever order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from geutil.memory.program import Node, Program


class Buffers:
    """The buffers that are alive, while nodes start and end; several may run at once.

    A tensor has a buffer of its own, or that of an input: always (`Node.aliases`), or
    if nobody else is to read it (`Node.reuses`). A buffer lives until the last reader
    of all tensors in it has ended, a fetched one to the end. A variable that is updated
    while its old buffer is still to be read has a second one until that was read.

    Args:
        program: the nodes and tensors.

    Attributes:
        held: the bytes that are alive now.
        reads: how often each tensor is read; once more if it is fetched.
        born: for each tensor, after how many starts of other nodes its buffer was made;
            -1 where it shares another tensor's or was not made yet.
        freed: for each tensor, at which start its buffer was last alive; -1 if it still
            is.
        buffer: the tensor for which the buffer of each tensor was made.
        holders: for each buffer, how many reads are still to come.
    """

    def __init__(self, program: Program) -> None:
        count = len(program.sizes)
        self._nodes, self._sizes = program.nodes, program.sizes
        self.reads = [0] * count
        for node in program.nodes:
            for tensor in node.inputs:
                self.reads[tensor] += 1
        for tensor in program.fetched:
            self.reads[tensor] += 1
        self.buffer = list(range(count))
        self.holders = [0] * count
        self._waits: dict[int, int] = {}
        self._awaiting: dict[int, list[int]] = {}
        self._unread: dict[int, list[int]] = {}
        self._step = -1
        self.held = 0
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
        """Allocate the outputs of a node and its temporary bytes.

        Returns:
            Its outputs that share a buffer, each with that.
        """
        self._step += 1
        sizes, reads, holders = self._sizes, self.reads, self.holders
        node = self._nodes[i]
        outputs = node.outputs
        pairs = self.shared(node) if node.aliases or node.reuses else []
        for tensor, source in pairs:
            self.buffer[tensor] = source
            holders[source] += reads[tensor]
        if node.updates:
            self._renew(node)
            outputs = outputs[1:]
        unread = []
        for tensor in outputs:
            if self.buffer[tensor] == tensor:
                self.born[tensor] = self._step
                self.held += sizes[tensor]
                holders[tensor] = reads[tensor]
                if not reads[tensor]:
                    unread.append(tensor)
        if unread:
            self._unread[i] = unread
        self.held += node.temporary
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
                for renewed in self._awaiting.pop(source, ()):
                    self._waits[renewed] -= 1
                    if not self._waits[renewed]:
                        unread.append(renewed)
        for tensor in unread:
            self.freed[tensor] = self._step
            self.held -= self._sizes[tensor]

    def close(self) -> None:
        """Note that buffers which are still alive lived to the end."""
        for tensor, born in enumerate(self.born):
            if born >= 0 and self.freed[tensor] < 0:
                self.freed[tensor] = self._step

    def growth(self, i: int) -> int:
        """Return how many bytes more are alive once a node has run."""
        node = self._nodes[i]
        sizes, reads, holders = self._sizes, self.reads, self.holders
        pairs = self.shared(node) if node.aliases or node.reuses else ()
        shared = {tensor for tensor, _ in pairs}
        passed_on = {source for tensor, source in pairs if reads[tensor]}
        growth = 0
        for tensor in node.outputs:
            if reads[tensor] and tensor not in shared:
                growth += sizes[tensor]
        if node.updates and any(holders[self.buffer[t]] for t in node.updates):
            growth += sizes[node.outputs[0]]
        counts: dict[int, int] = {}
        for tensor in node.inputs:
            source = self.buffer[tensor]
            counts[source] = counts.get(source, 0) + 1
        for source, count in counts.items():
            if holders[source] == count and source not in passed_on:
                growth -= sizes[source]
        return growth

    def still_read(self, i: int, readers: Collection[int]) -> Iterator[int]:
        """Yield the old buffers of variables that a node updates, with other readers.

        Args:
            i: the node.
            readers: the nodes that do not count as others.
        """
        for source in {self.buffer[tensor] for tensor in self._nodes[i].updates}:
            count = sum(
                self.buffer[tensor] == source
                for j in readers
                for tensor in self._nodes[j].inputs
            )
            if self.holders[source] > count:
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
