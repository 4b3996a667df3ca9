"""The order in which TensorFlow's executor runs a step with one thread."""

from __future__ import annotations

import random
from collections import deque

from geutil.errors import PredictionError
from geutil.memory.program import Program

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
    nodes = program.nodes
    successors = list(program.successors())
    if seed is not None:
        shuffle = random.Random(seed).shuffle
        for after in successors:
            if len(after) > ORDERED_EDGES:
                shuffle(after)
    pending = [len(node.inputs) + len(node.controls) for node in nodes]
    cheap = [node.cheap for node in nodes]
    # TensorFlow's source node: what waits for nothing else waits for it.
    source = len(nodes)
    starts = [i for i, count in enumerate(pending) if not count]
    for i in starts:
        pending[i] = 1
    successors.append(starts)
    if seed is not None and len(starts) > ORDERED_EDGES:
        shuffle(starts)
    pool = deque([source])
    order: list[int] = []
    inner: deque[int] = deque()
    while pool:
        inner.append(pool.popleft())
        while inner:
            i = inner.popleft()
            if i != source:
                order.append(i)
            kept = -1
            for successor in successors[i]:
                pending[successor] -= 1
                if pending[successor]:
                    continue
                if cheap[successor]:
                    inner.append(successor)
                else:
                    if kept >= 0:
                        pool.appendleft(kept)
                    kept = successor
            if kept >= 0:
                if inner:
                    pool.appendleft(kept)
                else:
                    inner.append(kept)
    if len(order) < len(nodes):
        stuck = next(i for i, count in enumerate(pending) if count)
        raise PredictionError(
            f"'{nodes[stuck].name}' never becomes ready: it waits for itself, or for "
            "a node that does"
        )
    return order
