"""The executor: the order in which devices run a program, and what is held meanwhile.

TensorFlow's partitioner sends a tensor once to each device that reads it, as soon as it
is made and whether the reader is ready or not. A program says the same with a node for
each receipt, between the maker and the readers there. Nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from geutil.errors import PlanError, PredictionError
from geutil.memory.buffers import Buffers
from geutil.memory.kernels.onednn import ORDERED_EDGES, with_onednn
from geutil.memory.pipeline import Pipeline, PipelineRun, run_pipeline
from geutil.memory.program import Node, Program, addresses, phases_of
from geutil.memory.timeline import Lifetime, LiveTensor, Moment, Timeline

SEEDS = 9
"""How many orders are tried where TensorFlow's depends on addresses."""
RECEIVED = " (received)"
"""Stands behind a tensor's name in that of the node that receives it."""
RECEIVE = "_Recv"
"""The type of such a node."""


def is_receipt(node: Node) -> bool:
    """Tell whether a node receives a tensor of another device."""
    return node.type == RECEIVE and RECEIVED in node.name


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
    tensor is received as soon as it is made. `successors` are those of the program,
    where they are known and no seed is given.

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
        address = addresses(nodes, seed)
        for after in (*successors, *starts):
            if len(after) > ORDERED_EDGES:
                after.sort(key=address.__getitem__)
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
        raise program.waits_forever(stuck)
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


@dataclass(frozen=True)
class Simulation:
    """The buffers of a program over time. A step is a place in `order`.

    Attributes:
        program: what was run.
        order: the nodes, by number, in the order in which they ran.
        held: the most bytes that are held while each step's node runs.
        born: for each tensor the step that made its buffer, or -1 where it shares
            another tensor's or was never made.
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
        """The most bytes that are held at once with what kernels take beside them."""
        nodes = self.program.nodes
        pairs = zip(self.order, self.held, strict=True)
        return max((held + nodes[i].packed for i, held in pairs), default=0)

    def alive(self, step: int) -> list[int]:
        """Return the tensors whose buffers are held at a step, largest first."""
        sizes = self.program.sizes
        spans = enumerate(zip(self.born, self.freed, strict=True))
        alive = [t for t, (b, f) in spans if 0 <= b <= step <= f and sizes[t]]
        return sorted(alive, key=lambda tensor: -sizes[tensor])

    def timeline(self, source: str = "predicted") -> Timeline:
        """Return the simulation with names in the place of numbers."""
        program, nodes = self.program, self.program.nodes
        lives = self._lifetimes()
        peak = max(range(len(self.order)), key=self.held.__getitem__, default=-1)
        at_peak = [life.tensor for life in lives if life.first <= peak <= life.last]
        needs = program.needs()
        place = {i: step for step, i in enumerate(self.order)}
        # Nodes go by their number in the program, phases by the place in the order.
        phases = phases_of(
            (nodes[i].name, [place[j] for j in needs[i]]) for i in self.order
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


@overload
def simulate(
    program: Program, order: Sequence[int] | None = None, *, seed: int | None = None
) -> Simulation: ...


@overload
def simulate(program: Pipeline) -> PipelineRun: ...


def simulate(
    program: Program | Pipeline,
    order: Sequence[int] | None = None,
    *,
    seed: int | None = None,
) -> Simulation | PipelineRun:
    """Run a program without computing anything, and note what it holds.

    A buffer is held until the last reader of every tensor that shares it has run; what
    is fetched, to the end. While a node runs it holds its inputs, its outputs and its
    temporary bytes. A variable that is changed while it is still to be read has a
    second buffer until it has been read.

    Args:
        program: the nodes and tensors; or a `Pipeline` of devices, of which a step is
            simulated as `geutil.memory.pipeline.run_pipeline` says.
        order: all nodes, by number, each after what it reads and waits for. Without
            it, the order of TensorFlow's executor (`execution_order`).
        seed: for `execution_order`.

    Returns:
        The bytes held at each step, and the life of each buffer; of a pipeline, its
        time, bubble, traffic and peaks.

    Raises:
        PredictionError: `order` is no order of the program's nodes, or none exists.
        PlanError: an order or a seed is passed with a pipeline.

    Cost: linear in nodes and edges; some 5 us for each node.

    Example:
        A chain of three, which never holds more than two tensors:

        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "MatMul", outputs=[0])
        >>> y = Node("y", "MatMul", inputs=[0], outputs=[1])
        >>> z = Node("z", "MatMul", inputs=[1], outputs=[2])
        >>> simulate(Program([x, y, z], sizes=[100, 100, 100], fetched=[2])).held
        [100, 200, 200]
    """
    if isinstance(program, Pipeline):
        if order is not None or seed is not None:
            raise PlanError(
                "order and seed are those of a program; a pipeline has a schedule: "
                "pass Pipeline(..., schedule='gpipe') or '1f1b'"
            )
        return run_pipeline(program)
    if order is None:
        order = execution_order(program, seed)
    else:
        _check_order(program, order)
    run = Run(program)
    for i in order:
        run.add(i)
    return run.simulation()


class Run:
    """A simulation to which nodes are added one by one.

    Args:
        program: the nodes and tensors.

    Attributes:
        buffers: the buffers that are alive.
    """

    def __init__(self, program: Program) -> None:
        self.buffers = Buffers(program)
        self._program = program
        self._order: list[int] = []
        self._held: list[int] = []

    def add(self, i: int) -> list[tuple[int, int]]:
        """Run a node; return its outputs that share a buffer, each with that."""
        buffers = self.buffers
        shared = buffers.start(i)
        self._order.append(i)
        self._held.append(buffers.held)
        buffers.end(i)
        return shared

    def simulation(self) -> Simulation:
        """Return the simulation of all nodes that were added."""
        self.buffers.close()
        born, freed = self.buffers.born, self.buffers.freed
        return Simulation(self._program, self._order, self._held, born, freed)


def typical(program: Program, onednn: bool, seeds: int = SEEDS) -> Simulation:
    """Return the simulation of median peak among some orders, an odd number."""
    runs = [
        simulate(with_onednn(program, seed) if onednn else program, seed=seed)
        for seed in range(seeds)
    ]
    return sorted(runs, key=lambda run: run.peak)[seeds // 2]


def _check_order(program: Program, order: Sequence[int]) -> None:
    """Raise if an order repeats or lacks a node, or has one before what it needs."""
    nodes, makers = program.nodes, program.makers
    done = [False] * len(nodes)
    for i in order:
        node = nodes[i]
        if done[i]:
            raise PredictionError(f"the order names '{node.name}' twice")
        for tensor in node.inputs:
            if tensor not in makers or not done[makers[tensor]]:
                raise PredictionError(
                    f"the order has '{node.name}' before what it reads, "
                    f"{_maker(program, tensor)}"
                )
        for control in node.controls:
            if not done[control]:
                raise PredictionError(
                    f"the order has '{node.name}' before '{nodes[control].name}', "
                    "which it waits for"
                )
        done[i] = True
    if len(order) < len(nodes):
        missing = nodes[done.index(False)].name
        raise PredictionError(
            f"the order leaves out '{missing}', which the step needs; give all "
            f"{len(nodes)} ops"
        )


def _maker(program: Program, tensor: int) -> str:
    if tensor in program.makers:
        return f"'{program.nodes[program.makers[tensor]].name}'"
    return f"tensor {tensor}, which no node makes"
