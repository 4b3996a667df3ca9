"""Cuts between devices: a program with what is sent, and the order of its devices.

TensorFlow's partitioner sends a tensor once to each device that reads it, as soon as it
is made and whether the reader is ready or not. A program says the same with a node for
each receipt, between the maker and the readers there. Numbers only: nothing here knows
TensorFlow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from geutil.errors import PredictionError
from geutil.memory.program import ORDERED_EDGES, Node, Program

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
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
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


def program_of(program: Program, devices: Sequence[int], device: int) -> Program:
    """Return a program in which only the buffers of one device have a size.

    The nodes of the others are still there, since what they wait for orders the nodes
    of this one. Where two devices share a memory, what reads a tensor of this one in
    place is taken to hold it for its own readers.

    Args:
        program: the nodes, with receipts.
        devices: the device of each node.
        device: the one that counts.

    Cost: linear in nodes and edges.
    """
    own = {
        tensor
        for node, where in zip(program.nodes, devices, strict=True)
        if where == device
        for tensor in node.outputs
    }
    nodes = []
    for node, where in zip(program.nodes, devices, strict=True):
        if where == device:
            nodes.append(
                node.changed(
                    aliases=[p for p in node.aliases if node.inputs[p[1]] in own],
                    reuses=[p for p in node.reuses if node.inputs[p[1]] in own],
                )
            )
        else:
            aliases = list(node.aliases)
            for out, place in node.reuses:
                if out not in {o for o, _ in aliases}:
                    aliases.append((out, place))
            nodes.append(node.changed(aliases=aliases, reuses=(), temporary=0, surge=0))
    sizes = [size if t in own else 0 for t, size in enumerate(program.sizes)]
    return replace(program, nodes=nodes, sizes=sizes)


class _Executor:
    """One thread of a device: see `geutil.memory.execution_order`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._pool: deque[int] = deque()
        self._inner: deque[int] = deque()

    def take(self) -> int | None:
        """Return the node that runs next, None if none is ready."""
        if not self._inner:
            if not self._pool:
                return None
            self._inner.append(self._pool.popleft())
        return self._inner.popleft()

    def make_ready(self, ready: Sequence[int]) -> None:
        """Take up what a node of the thread has made ready."""
        expensive = -1
        for i in ready:
            if self._nodes[i].cheap:
                self._inner.append(i)
                continue
            if expensive >= 0:
                self._pool.appendleft(expensive)
            expensive = i
        if expensive >= 0:
            if self._inner:
                self._pool.appendleft(expensive)
            else:
                self._inner.append(expensive)

    def hand_over(self, i: int) -> None:
        """Take up what another thread has made ready, after all else."""
        self._pool.append(i)


def joint_order(
    program: Program, devices: Sequence[int], seed: int | None = None
) -> list[int]:
    """Return the nodes in the order in which devices run them side by side.

    Each device has a thread, as in `execution_order`; they run a node each in turn. A
    tensor is received as soon as it is made.

    Args:
        program: the nodes, with receipts.
        devices: the device of each node.
        seed: as in `execution_order`.

    Returns:
        The numbers of the nodes.

    Raises:
        PredictionError: nodes wait for each other.

    Cost: linear in nodes and edges.

    Example:
        Two chains on two devices:

        >>> from geutil.memory.program import Node, Program
        >>> nodes = [Node("a", "Relu", outputs=[0]), Node("b", "Relu", inputs=[0])]
        >>> nodes += [Node("c", "Relu", outputs=[1]), Node("d", "Relu", inputs=[1])]
        >>> joint_order(Program(nodes, [4, 4]), [0, 0, 1, 1])
        [0, 2, 1, 3]
    """
    return _Devices(program, devices, seed).run()


class _Devices:
    """The executors of all devices."""

    def __init__(
        self, program: Program, devices: Sequence[int], seed: int | None
    ) -> None:
        self._nodes, self._devices = program.nodes, devices
        self._successors = list(program.successors())
        self._pending = [len(n.inputs) + len(n.controls) for n in program.nodes]
        count = max(devices, default=-1) + 1
        self._executors = [_Executor(program.nodes) for _ in range(count)]
        starts: list[list[int]] = [[] for _ in range(count)]
        for i, pending in enumerate(self._pending):
            if not pending:
                starts[devices[i]].append(i)
        # The order of these edges changes from Session to Session.
        if seed is not None:
            shuffle = random.Random(seed).shuffle
            for after in (*self._successors, *starts):
                if len(after) > ORDERED_EDGES:
                    shuffle(after)
        for executor, first in zip(self._executors, starts, strict=True):
            executor.make_ready(first)
        self._order: list[int] = []

    def run(self) -> list[int]:
        """Run all nodes, and return their order."""
        while True:
            taken = [(e, e.take()) for e in self._executors]
            if all(i is None for _, i in taken):
                break
            for executor, i in taken:
                if i is not None:
                    executor.make_ready(self._finish(i))
        if len(self._order) < len(self._nodes):
            done = set(self._order)
            stuck = next(n for i, n in enumerate(self._nodes) if i not in done)
            raise PredictionError(
                f"'{stuck.name}' never becomes ready: it waits for itself, or for a "
                "node that does"
            )
        return self._order

    def _finish(self, i: int) -> list[int]:
        """Run a node; return what becomes ready on its device."""
        own: list[int] = []
        done = deque([i])
        while done:
            node = done.popleft()
            self._order.append(node)
            for successor in self._successors[node]:
                self._pending[successor] -= 1
                if self._pending[successor]:
                    continue
                where = self._devices[successor]
                if is_receipt(self._nodes[successor]):
                    done.append(successor)
                elif where == self._devices[i] and node == i:
                    own.append(successor)
                else:
                    self._executors[where].hand_over(successor)
        return own
