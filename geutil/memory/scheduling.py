"""An order in which a step holds little: what frees memory first, the rest late."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from geutil.memory.execution import execution_order
from geutil.memory.program import Node, Program

SMALL = 8
"""Tensors below this part of the largest one do not matter for the order."""


def negligible_size(program: Program) -> int:
    """Return the bytes up to which a tensor does not matter for the order."""
    return max(program.sizes, default=0) // SMALL


def frugal_order(program: Program) -> list[int]:
    """Return the nodes in an order that holds little while the late ones run.

    Nodes that are not late come first, in the order of TensorFlow's executor. Of the
    late ones, whatever holds no more than before runs as soon as it can. If there is
    no such node, the one with the longest way to the end runs: what is only needed at
    the end of a shorter way, to be added to the result of a longer one, would be held
    in the meantime. (List scheduling by critical path, Coffman and Graham 1972, after
    what is for free.)

    Args:
        program: the nodes and their edges. What reads or awaits a late node is late.

    Returns:
        The numbers of the nodes.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: linear in nodes and edges, times the logarithm of how many are ready at once;
        some 15 us for each node.

    Example:
        The sum waits for `long`, so `short` had better run after it:

        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "Relu", outputs=[0])
        >>> short = Node("short", "Tile", inputs=[0], outputs=[1], late=True)
        >>> first = Node("first", "Exp", inputs=[0], outputs=[2], late=True)
        >>> long = Node("long", "Sum", inputs=[2], outputs=[3], late=True)
        >>> both = Node("both", "Add", inputs=[1, 3], outputs=[4], late=True)
        >>> nodes = [x, short, first, long, both]
        >>> order = frugal_order(Program(nodes, sizes=[8, 80, 80, 80, 80]))
        >>> [nodes[i].name for i in order]
        ['x', 'first', 'long', 'short', 'both']
    """
    usual = execution_order(program)
    nodes = program.nodes
    successors = list(program.successors())
    heights = _heights(usual, successors)
    buffers = _Buffers(program)
    small = negligible_size(program)
    pending = [len(node.inputs) + len(node.controls) for node in nodes]
    ready: list[tuple[bool, int, int]] = []
    waiting = [False] * len(nodes)

    def offer(i: int) -> None:
        waiting[i] = True
        heapq.heappush(ready, (buffers.growth(nodes[i]) > small, -heights[i], i))

    order: list[int] = []

    def run(i: int) -> None:
        order.append(i)
        waiting[i] = False
        for j in successors[i]:
            pending[j] -= 1
        changed = buffers.run(nodes[i])
        for j in dict.fromkeys(successors[i]):
            if not pending[j] and nodes[j].late:
                offer(j)
        for j in changed:
            if waiting[j]:
                offer(j)

    for i in usual:
        if not nodes[i].late:
            run(i)
    for i in usual:
        if nodes[i].late and not pending[i] and not waiting[i]:
            offer(i)
    while ready:
        i = heapq.heappop(ready)[-1]
        # Offered again since, and run.
        if waiting[i]:
            run(i)
    return order


def _heights(order: Sequence[int], successors: Sequence[Sequence[int]]) -> list[int]:
    """Return for each node the number of nodes on the longest way from it."""
    heights = [0] * len(order)
    for i in reversed(order):
        heights[i] = 1 + max((heights[j] for j in successors[i]), default=0)
    return heights


class _Buffers:
    """The buffers that are held while nodes run."""

    def __init__(self, program: Program) -> None:
        self._sizes = program.sizes
        self._small = negligible_size(program)
        self._reads = [0] * len(program.sizes)
        self._readers: list[list[int]] = [[] for _ in program.sizes]
        for i, node in enumerate(program.nodes):
            for tensor in node.inputs:
                self._reads[tensor] += 1
                self._readers[tensor].append(i)
        for tensor in program.fetched:
            self._reads[tensor] += 1
        self._buffer = list(range(len(program.sizes)))
        self._sharing: dict[int, list[int]] = {}
        self._holders = [0] * len(program.sizes)

    def growth(self, node: Node) -> int:
        """Return how many bytes more are held once a node has run."""
        counts = Counter(self._buffer[tensor] for tensor in node.inputs)
        freed = {b for b, count in counts.items() if self._holders[b] == count}
        shared = dict(self._shared(node))
        freed.difference_update(b for t, b in shared.items() if self._reads[t])
        made = (t for t in node.outputs if t not in shared and self._reads[t])
        return sum(self._sizes[t] for t in made) - sum(self._sizes[b] for b in freed)

    def run(self, node: Node) -> list[int]:
        """Hold what a node makes, and let go of what it read.

        Returns:
            The nodes that may now free more than before: the last readers.
        """
        for tensor, taken in list(self._shared(node)):
            self._buffer[tensor] = taken
            self._sharing.setdefault(taken, [taken]).append(tensor)
        for tensor in node.outputs:
            self._holders[self._buffer[tensor]] += self._reads[tensor]
        last: list[int] = []
        for tensor in node.inputs:
            taken = self._buffer[tensor]
            self._holders[taken] -= 1
            # A node seldom reads a tensor more than twice.
            if self._holders[taken] in (1, 2) and self._sizes[taken] > self._small:
                for other in self._sharing.get(taken, [taken]):
                    last += self._readers[other]
        return last

    def _shared(self, node: Node) -> Iterator[tuple[int, int]]:
        """Yield the outputs that get no buffer of their own, and whose they get."""
        met: set[int] = set()
        taken: set[int] = set()
        for out, place in node.aliases:
            tensor, buffer = node.outputs[out], self._buffer[node.inputs[place]]
            met.add(tensor)
            taken.add(buffer)
            yield tensor, buffer
        for out, place in node.reuses:
            tensor, buffer = node.outputs[out], self._buffer[node.inputs[place]]
            if (
                tensor not in met
                and buffer not in taken
                and self._holders[buffer] == 1
                and self._sizes[buffer] == self._sizes[tensor]
            ):
                met.add(tensor)
                taken.add(buffer)
                yield tensor, buffer
