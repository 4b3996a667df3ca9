"""What a step holds when two threads run it.

TensorFlow's executor has a thread for each core. Beside the thread that goes down the
backward pass, others do weight gradients and start what comes next; more is held then
than one thread needs, and how much more depends on what is kept.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from geutil.memory.predicting.kernels import ONEDNN
from geutil.memory.program import Node, Program

_THREADS = 2
_HEAVY = 4.0
"""How much longer a product or convolution takes than a simple op on as many bytes."""


def peak_of_two_threads(program: Program) -> int:
    """Return the most bytes held at once if two threads run a program.

    An op takes as long as its inputs and outputs are large; its inputs are held until
    it has run. Which op a thread takes is as in `execution_order`.

    Args:
        program: the nodes and their edges.

    Cost: linear in nodes and edges, times the logarithm of a few; some 10 us a node.

    Example:
        Two ops that one thread would run one after the other:

        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "Relu", outputs=[0])
        >>> y = Node("y", "Relu", inputs=[0], outputs=[1])
        >>> z = Node("z", "Relu", inputs=[0], outputs=[2])
        >>> peak_of_two_threads(Program([x, y, z], [100, 100, 100]))
        300
    """
    holding = _Holding(program)
    peak = 0
    for place, is_start in _events(program):
        if is_start:
            holding.start(program.nodes[place])
            peak = max(peak, holding.live)
        else:
            holding.finish(program.nodes[place])
    return peak


def _events(program: Program) -> Iterator[tuple[int, bool]]:
    """Yield (node, True) when a node starts, and (node, False) when it has run."""
    nodes = program.nodes
    successors = list(program.successors())
    pending = [len(node.inputs) + len(node.controls) for node in nodes]
    pool = deque(i for i, count in enumerate(pending) if not count)
    own: list[deque[int]] = [deque() for _ in range(_THREADS)]
    running: list[tuple[float, int, int]] = []
    idle = list(range(_THREADS))
    now = 0.0
    while True:
        waiting, idle = idle, []
        for thread in waiting:
            queue = own[thread] or pool
            if not queue:
                idle.append(thread)
                continue
            place = queue.popleft()
            ends = now + _duration(nodes[place], program.sizes)
            heapq.heappush(running, (ends, thread, place))
            yield place, True
        if not running:
            return
        now, thread, place = heapq.heappop(running)
        yield place, False
        ready = []
        for successor in successors[place]:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
        _hand_out(ready, nodes, own[thread], pool)
        idle.insert(0, thread)


def _hand_out(
    ready: list[int], nodes: Sequence[Node], own: deque[int], pool: deque[int]
) -> None:
    """Put the nodes that a node made ready into its thread's queue or the pool."""
    heavy: list[int] = []
    for place in ready:
        (own if nodes[place].cheap else heavy).append(place)
    if heavy and not own:
        own.append(heavy.pop())
    pool.extendleft(heavy)


def _duration(node: Node, sizes: Sequence[int]) -> float:
    moved = sum(sizes[t] for t in node.inputs) + sum(sizes[t] for t in node.outputs)
    return 1.0 + moved * (_HEAVY if node.type in ONEDNN else 1.0)


class _Holding:
    """The buffers that are held, while nodes start and finish."""

    def __init__(self, program: Program) -> None:
        self.live = 0
        self._sizes = program.sizes
        self._buffer = list(range(len(program.sizes)))
        self._holders = [0] * len(program.sizes)
        self._reads = [0] * len(program.sizes)
        for node in program.nodes:
            for tensor in node.inputs:
                self._reads[tensor] += 1
        for tensor in program.fetched:
            self._reads[tensor] += 1

    def start(self, node: Node) -> None:
        """Take what a node makes."""
        buffer, holders, sizes = self._buffer, self._holders, self._sizes
        shared = [(node.outputs[out], node.inputs[i]) for out, i in node.aliases]
        for out, i in node.reuses:
            tensor, taken = node.outputs[out], buffer[node.inputs[i]]
            # One holder is this node: nobody else will read the buffer.
            if holders[taken] == 1 and sizes[taken] == sizes[tensor]:
                shared.append((tensor, taken))
                break
        for tensor, source in shared:
            buffer[tensor] = buffer[source]
        for tensor in node.outputs:
            # The node itself holds what it makes until it has run.
            holders[buffer[tensor]] += self._reads[tensor] + 1
            if buffer[tensor] == tensor:
                self.live += sizes[tensor]
        self.live += node.temporary

    def finish(self, node: Node) -> None:
        """Let go of what a node read, and of what nobody will read."""
        self.live -= node.temporary
        for tensor in (*node.inputs, *node.outputs):
            taken = self._buffer[tensor]
            self._holders[taken] -= 1
            if not self._holders[taken]:
                self.live -= self._sizes[taken]
