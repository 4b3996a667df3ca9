"""The executor: in which order devices run the nodes of a program, and what they send.

TensorFlow's partitioner sends a tensor once to each device that reads it, as soon as it
is made and whether the reader is ready or not. A program says the same with a node for
each receipt, between the maker and the readers there. Nothing here knows TensorFlow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from geutil.errors import PredictionError
from geutil.memory.program import Node, Program

RECEIVED = " (received)"
"""Stands behind a tensor's name in that of the node that receives it."""
_RECEIVE = "_Recv"


@dataclass(frozen=True)
class Crossing:
    """A tensor that is sent to another device.

    Attributes:
        tensor: its number.
        source: the device that made it, by number.
        target: the one that reads it.
        bytes: its size.
        copied: whether it has a buffer there: devices of one memory pass it on.
    """

    tensor: int
    source: int
    target: int
    bytes: int
    copied: bool


@dataclass(frozen=True)
class Split:
    """A program with its receipts.

    Attributes:
        program: the nodes, receipts among them right behind the makers.
        devices: the device of each node by its name, as a number.
        crossings: what is sent, in the order of the tensors and targets.
    """

    program: Program
    devices: dict[str, int]
    crossings: Sequence[Crossing]

    def numbers(self, program: Program) -> list[int]:
        """Return the device of each node of the program, whatever its order is now."""
        return [self.devices[node.name] for node in program.nodes]


def split(
    program: Program,
    devices: Sequence[int],
    size_of: Callable[[int], int],
    shared: Callable[[int, int], bool],
    home: int,
) -> Split:
    """Return a program with a receipt for each tensor and device that it is sent to.

    Args:
        program: the nodes, each after what it reads.
        devices: the device of each node, as a number.
        size_of: the bytes of a tensor, by number, also where `Program.sizes` has 0.
        shared: tells whether one device reads another's tensors where they are.
        home: the device that fetched tensors are sent to.

    Cost: linear in nodes and edges.
    """
    targets: dict[int, dict[int, None]] = {}
    maker = program.makers
    for i, node in enumerate(program.nodes):
        for tensor in node.inputs:
            if devices[maker[tensor]] != devices[i]:
                targets.setdefault(tensor, {})[devices[i]] = None
    for tensor in program.fetched:
        if devices[maker[tensor]] != home:
            targets.setdefault(tensor, {})[home] = None
    crossings = [
        Crossing(tensor, source, target, size_of(tensor), not shared(source, target))
        for tensor in sorted(targets)
        for source in [devices[maker[tensor]]]
        for target in sorted(targets[tensor])
    ]
    return _Splitter(program, devices, crossings, home).result()


class _Splitter:
    """Builds the program with receipts."""

    def __init__(
        self,
        program: Program,
        devices: Sequence[int],
        crossings: Sequence[Crossing],
        home: int,
    ) -> None:
        self._program, self._devices, self._home = program, devices, home
        self._crossings = crossings
        self._sizes = list(program.sizes)
        self._there: dict[tuple[int, int], int] = {}
        self._by_tensor: dict[int, list[Crossing]] = {}
        # Devices of one memory pass it on: no buffer of its own.
        for crossing in crossings:
            if crossing.copied:
                self._by_tensor.setdefault(crossing.tensor, []).append(crossing)
                self._there[crossing.tensor, crossing.target] = len(self._sizes)
                self._sizes.append(crossing.bytes)

    def result(self) -> Split:
        """Return the program, and the devices of its nodes."""
        nodes: list[Node] = []
        device_of: dict[str, int] = {}
        place: list[int] = []
        for i, node in enumerate(self._program.nodes):
            place.append(len(nodes))
            nodes.append(self._received(node, self._devices[i]))
            device_of[node.name] = self._devices[i]
            for out, tensor in enumerate(node.outputs):
                for crossing in self._by_tensor.get(tensor, ()):
                    name = f"{node.name}:{out}{RECEIVED} {crossing.target}"
                    number = self._there[tensor, crossing.target]
                    nodes.append(Node(name, _RECEIVE, [tensor], [number]))
                    device_of[name] = crossing.target
        nodes = [n.changed(controls=[place[c] for c in n.controls]) for n in nodes]
        fetched = [self._there.get((t, self._home), t) for t in self._program.fetched]
        program = replace(
            self._program, nodes=nodes, sizes=self._sizes, fetched=fetched
        )
        return Split(program, device_of, self._crossings)

    def _received(self, node: Node, device: int) -> Node:
        """Return a node that reads what its device has received."""
        there = self._there
        inputs = [there.get((tensor, device), tensor) for tensor in node.inputs]
        # What is sent lies where a network card could read it: a kernel takes over an
        # input for that only if the input does, too. What was received may still be in
        # the hands of the transport when its first reader starts: it is not taken over.
        reuses = [
            (out, place)
            for out, place in node.reuses
            if inputs[place] == node.inputs[place]
            and (
                node.outputs[out] not in self._by_tensor
                or node.inputs[place] in self._by_tensor
            )
        ]
        # A variable is where its updates are: those tensors are never received.
        return node.changed(inputs=inputs, reuses=reuses)


def is_receipt(node: Node) -> bool:
    """Tell whether a node receives a tensor of another device."""
    return node.type == _RECEIVE and RECEIVED in node.name


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
