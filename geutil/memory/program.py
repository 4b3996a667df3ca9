"""Programs: a step as numbers, the executor's order, and the phase of each op.

Nothing here knows TensorFlow, so a plan can be tried out without building its graph.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from geutil.errors import PredictionError

PHASES = ("forward", "recompute", "backward", "update")
"""The parts, in the order in which they begin."""

_RECOMPUTED = "recomputed"
_GRADIENTS = ("gradients", "gradient_tape")
"""The scopes of what runs again, and of gradients: geutil's and TensorFlow's names."""


def phases_of(ops: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Return the phase of each op of a step.

    Gradients lie in a scope that TensorFlow or geutil gave them, and what runs again in
    geutil's own. Of the rest, what depends on either is the update, and what does not
    is the forward pass.

    Args:
        ops: in the order in which they run, the name of each, and the places of those
            that it reads or waits for.

    Returns:
        For each op, "forward", "recompute", "backward" or "update".

    Cost: linear in ops and edges.

    Example:
        >>> step = [("x", []), ("y", [0]), ("gradients/y_grad", [1]), ("w/add", [2])]
        >>> phases_of(step)
        ['forward', 'forward', 'backward', 'update']
    """
    phases: list[str] = []
    depends: list[bool] = []
    for name, reads in ops:
        phase = _scoped(name)
        behind = any(depends[place] for place in reads)
        phases.append(phase or ("update" if behind else "forward"))
        # A constant in the scope of gradients may serve the forward pass, too:
        # Grappler keeps one of several that are equal.
        depends.append(behind or (phase is not None and bool(reads)))
    return phases


def _scoped(name: str) -> str | None:
    for part in name.split("/")[:-1]:
        if _is_scope(part, _RECOMPUTED):
            return "recompute"
        if any(_is_scope(part, scope) for scope in _GRADIENTS):
            return "backward"
    return None


def _is_scope(part: str, scope: str) -> bool:
    """Tell whether a part of a name is a scope, maybe with a number behind it."""
    rest = part.removeprefix(scope)
    return rest != part and (not rest or (rest[0] == "_" and rest[1:].isdigit()))


class Node(NamedTuple):
    """An op of a step.

    Attributes:
        name: its name.
        type: its type.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        controls: the nodes that it waits for besides, by number.
        aliases: pairs (output, input) of places: the output is the input's buffer.
        reuses: pairs (output, input) of places, best first: the output takes over the
            input's buffer if it is of its size and nobody else will read it.
        temporary: the bytes that it holds only while it runs.
        surge: the bytes that it may hold besides under a bad schedule: more iterations
            of a loop at once.
        cheap: the executor runs it at once rather than hand it to a thread.
        queue: nodes with the same one can wait for each other
            (`geutil.memory.dependencies`); None if a node runs as soon as it can.
        updates: of a node that changes a variable: the tensors that are the variable's
            buffer until then. If any is still to be read, the first output is a new
            buffer for the variable, which counts until the old one is let go; else
            there is no such buffer.
    """

    name: str
    type: str
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    controls: Sequence[int] = ()
    aliases: Sequence[tuple[int, int]] = ()
    reuses: Sequence[tuple[int, int]] = ()
    temporary: int = 0
    surge: int = 0
    cheap: bool = False
    queue: str | None = None
    updates: Sequence[int] = ()

    def changed(self, **changes: Any) -> Node:
        """Return the node with some attributes changed."""
        return self._replace(**changes)


@dataclass(frozen=True)
class Program:
    """A step: nodes, and the tensors between them.

    Attributes:
        nodes: the nodes; a node's number is its place. Any order will do, but where
            several nodes are ready at once their order decides.
        sizes: the bytes of each tensor. What is held all the time (variables,
            constants, what the caller feeds) has size 0.
        fetched: the tensors that are held to the end, by number.
        variable_bytes: what the variables hold.
        constant_bytes: what the constants hold.
    """

    nodes: Sequence[Node]
    sizes: Sequence[int]
    fetched: Collection[int] = ()
    variable_bytes: int = 0
    constant_bytes: int = 0

    def with_queues(self, queues: Sequence[str | None]) -> Program:
        """Return the program with a queue for each node."""
        pairs = zip(self.nodes, queues, strict=True)
        return replace(self, nodes=[node.changed(queue=queue) for node, queue in pairs])

    def with_elsewhere(self, numbers: Iterable[int]) -> Program:
        """Return the program of a device, where others hold the results of some nodes.

        What they make counts for nothing, and what reads it there has a buffer of its
        own.

        Args:
            numbers: those of the nodes.
        """
        away = set(numbers)
        made = {t for i in away for t in self.nodes[i].outputs}
        if not away:
            return self
        nodes = [
            node.changed(aliases=(), reuses=(), temporary=0, surge=0)
            if i in away
            else node.changed(
                aliases=[p for p in node.aliases if node.inputs[p[1]] not in made],
                reuses=[p for p in node.reuses if node.inputs[p[1]] not in made],
            )
            for i, node in enumerate(self.nodes)
        ]
        sizes = [0 if t in made else size for t, size in enumerate(self.sizes)]
        return replace(self, nodes=nodes, sizes=sizes)

    def of_device(
        self, here: Collection[int], size_of: Callable[[int], int]
    ) -> Program:
        """Return the program of one of several devices.

        The nodes of others are there, hold nothing, and run as soon as they can: no
        tensor arrives earlier, so that none is held for longer. What is received has a
        buffer from its arrival to its last reader, one for all readers; what is sent is
        gone for this device when it has been made.

        Args:
            here: the nodes of the device, by number.
            size_of: the bytes that a tensor takes where it is received.

        Cost: linear in nodes and edges.
        """
        sizes = list(self.sizes)
        own = {t for i in here for t in self.nodes[i].outputs}
        posts: dict[int, int] = {}
        messages: list[Node] = []

        def across(tensor: int, is_here: bool) -> int:
            if (tensor in own) == is_here:
                return tensor
            if tensor not in posts:
                posts[tensor] = len(sizes)
                kind = "received" if is_here else "sent"
                sizes.append(size_of(tensor) if is_here else 0)
                outputs = [posts[tensor]]
                name = f"{kind} {tensor}"
                messages.append(Node(name, kind, [tensor], outputs, cheap=True))
            return posts[tensor]

        nodes = []
        for i, node in enumerate(self.nodes):
            is_here = i in here
            inputs = [across(t, is_here) for t in node.inputs]
            if is_here:
                nodes.append(node.changed(inputs=inputs))
                continue
            for t in node.outputs:
                sizes[t] = 0
            nodes.append(
                Node(
                    node.name,
                    node.type,
                    inputs,
                    node.outputs,
                    node.controls,
                    cheap=True,
                )
            )
        return replace(self, nodes=[*nodes, *messages], sizes=sizes)

    def successors(self) -> Iterator[list[int]]:
        """Yield, for each node, the nodes it makes ready: a node once for each edge.

        Readers come first, by place, then the nodes that only wait.

        Cost: linear in nodes and edges.
        """
        readers: list[list[int]] = [[] for _ in self.sizes]
        waiting: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for tensor in node.inputs:
                readers[tensor].append(i)
            for control in node.controls:
                waiting[control].append(i)
        for node, after in zip(self.nodes, waiting, strict=True):
            outputs = node.outputs
            if len(outputs) == 1:
                yield readers[outputs[0]] + after
            else:
                data = [reader for tensor in outputs for reader in readers[tensor]]
                yield sorted(data) + after


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
            expensive_node = -1
            for successor in successors[i]:
                pending[successor] -= 1
                if pending[successor]:
                    continue
                if cheap[successor]:
                    inner.append(successor)
                else:
                    if expensive_node >= 0:
                        pool.appendleft(expensive_node)
                    expensive_node = successor
            if expensive_node >= 0:
                if inner:
                    pool.appendleft(expensive_node)
                else:
                    inner.append(expensive_node)
    if len(order) < len(nodes):
        stuck = next(i for i, count in enumerate(pending) if count)
        raise PredictionError(
            f"'{nodes[stuck].name}' never becomes ready: it waits for itself, or for "
            "a node that does"
        )
    return order
