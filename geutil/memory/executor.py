"""The executor: in which order devices run the nodes of a program.

TensorFlow's partitioner sends a tensor once to each device that reads it, as soon as it
is made and whether the reader is ready or not. A program says the same with a node for
each receipt, between the maker and the readers there. Nothing here knows TensorFlow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from geutil.errors import PredictionError
from geutil.memory.program import Node, Program

RECEIVED = " (received)"
"""Stands behind a tensor's name in that of the node that receives it."""
RECEIVE = "_Recv"
"""The type of such a node."""


def is_receipt(node: Node) -> bool:
    """Tell whether a node receives a tensor of another device."""
    return node.type == RECEIVE and RECEIVED in node.name


ORDERED_EDGES = 8
"""Beyond so many edges TensorFlow keeps a node's in a hash set of pointers, whose order
changes from Session to Session."""


def execution_order(program: Program, seed: int | None = None) -> list[int]:
    """Return the nodes of a program in the order in which one thread runs them.

    A model of TensorFlow's executor with a pool of one thread. The thread works on an
    inner queue, first in, first out. A node that becomes ready joins it if it is cheap.
    Of the other nodes that become ready together, the last joins it if the queue is
    empty; the rest are handed to the pool, which takes up last what came first. Nodes
    that wait for nothing become ready together, when the source node has run.

    Args:
        program: the nodes and their edges.
        seed: stands for the addresses of edges, on which the order depends where a node
            has more than eight; without it their order is that of the nodes.

    Returns:
        The numbers of the nodes.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: linear in nodes and edges.

    Example:
        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "Relu", outputs=[0])
        >>> y = Node("y", "Relu", inputs=[0])
        >>> z = Node("z", "Relu", inputs=[0])
        >>> execution_order(Program([x, y, z], [4]))
        [0, 2, 1]
    """
    return joint_order(program, [0] * len(program.nodes), seed)


def joint_order(
    program: Program,
    devices: Sequence[int],
    seed: int | None = None,
    successors: Sequence[list[int]] | None = None,
) -> list[int]:
    """Return the nodes in the order in which devices run them side by side.

    Each device has a thread, as in `execution_order`; they run a node each in turn. A
    tensor is received as soon as it is made.

    Args:
        program: the nodes, with receipts.
        devices: the device of each node.
        seed: as in `execution_order`.
        successors: those of the program, where they are known and no seed is given.

    Example:
        Two chains on two devices:

        >>> from geutil.memory.program import Node, Program
        >>> nodes = [Node("a", "Relu", outputs=[0]), Node("b", "Relu", inputs=[0])]
        >>> nodes += [Node("c", "Relu", outputs=[1]), Node("d", "Relu", inputs=[1])]
        >>> joint_order(Program(nodes, [4, 4]), [0, 0, 1, 1])
        [0, 2, 1, 3]
    """
    nodes = program.nodes
    successors = list(program.successors()) if successors is None else successors
    pending = [len(node.inputs) + len(node.controls) for node in nodes]
    # TensorFlow's source node: the nodes that wait for nothing wait for it.
    starts: list[list[int]] = [[] for _ in range(max(devices, default=-1) + 1)]
    for i, count in enumerate(pending):
        if not count:
            starts[devices[i]].append(i)
    if seed is not None:
        shuffle = random.Random(seed).shuffle
        for after in (*successors, *starts):
            if len(after) > ORDERED_EDGES:
                shuffle(after)
    threads = [_Thread(nodes) for _ in starts]
    for thread, first in zip(threads, starts, strict=True):
        thread.make_ready(first)
    order: list[int] = []
    while running := [i for i in (thread.take() for thread in threads) if i >= 0]:
        for i in running:
            own: list[int] = []
            done = deque([i])
            while done:
                node = done.popleft()
                order.append(node)
                for successor in successors[node]:
                    pending[successor] -= 1
                    if pending[successor]:
                        continue
                    where = devices[successor]
                    if where == devices[i] and node == i:
                        own.append(successor)
                    elif is_receipt(nodes[successor]):
                        done.append(successor)
                    else:
                        # After all else that the other thread has to do.
                        threads[where].pool.append(successor)
            threads[devices[i]].make_ready(own)
    if len(order) < len(nodes):
        stuck = next(i for i, count in enumerate(pending) if count)
        raise PredictionError(
            f"'{nodes[stuck].name}' never becomes ready: it waits for itself, or for "
            "a node that does"
        )
    return order


class _Thread:
    """One thread of a device, with its inner queue and its pool."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._cheap = [node.cheap for node in nodes]
        self.pool: deque[int] = deque()
        self._inner: deque[int] = deque()

    def take(self) -> int:
        """Return the node that runs next, -1 if none is ready."""
        if self._inner:
            return self._inner.popleft()
        return self.pool.popleft() if self.pool else -1

    def make_ready(self, ready: Sequence[int]) -> None:
        """Enqueue the nodes that a node of the thread has made ready."""
        expensive = -1
        for i in ready:
            if self._cheap[i]:
                self._inner.append(i)
                continue
            if expensive >= 0:
                self.pool.appendleft(expensive)
            expensive = i
        if expensive >= 0:
            (self.pool.appendleft if self._inner else self._inner.append)(expensive)
