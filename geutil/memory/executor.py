"""The executor: the order in which devices run a program, and simulations of it.

TensorFlow's partitioner sends a tensor once to each device that reads it, as soon as it
is made, whether the reader is ready or not: a program has a node for each receipt,
between the maker and the readers there. A pipeline is coarser: each stage of a model is
on a device of its own, and the micro-batches of a step go through the stages forwards,
and back. Nothing here knows TensorFlow.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import Literal, overload

from geutil.errors import PlanError, PredictionError
from geutil.memory.buffers import Buffers, Simulation
from geutil.memory.kernels.onednn import ORDERED_EDGES, with_onednn
from geutil.memory.program import Node, Program, addresses

SEEDS = 9
"""How many orders are tried where TensorFlow's depends on addresses."""
RECEIVED = " (received)"
"""Stands behind a tensor's name in that of the node that receives it."""
RECEIVE = "_Recv"
"""The type of such a node."""


def is_receipt(node: Node) -> bool:
    """Return whether a node receives a tensor of another device."""
    return node.type == RECEIVE and RECEIVED in node.name


def execution_order(program: Program, seed: int | None = None) -> list[int]:
    """Return the nodes of a program in the order in which one thread runs them.

    A model of TensorFlow's executor with a pool of one thread. The thread takes nodes
    from an inner queue, first in, first out. A node that becomes ready joins it if it
    is cheap. Of the other nodes that become ready together, the last joins it if the
    queue is empty; the rest go to the pool, which runs the last one first. Nodes that
    wait for nothing become ready together, when the source node has run.

    Args:
        program: the nodes and their edges.
        seed: replaces the addresses of edges, on which the order depends where a node
            has more than eight of them; without it, edges follow the order of the
            nodes.

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
    """Return the nodes in the order in which devices run them side by side."""
    # Each device has a thread, as in `execution_order`; they run a node each in turn. A
    # tensor is received as soon as it is made. `successors` are those of the program,
    # where they are known and no seed is given.
    nodes = program.nodes
    successors = list(program.successors()) if successors is None else successors
    pending = program.pending()
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
            # With the tensors that it sends, which are received at once.
            done = [i]
            for node in done:
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
    program.require_done(pending)
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
        # As in TensorFlow: a thread without cheap nodes keeps the last expensive one.
        if expensive >= 0:
            (self.pool.appendleft if self._inner else self._inner.append)(expensive)


Schedule = Literal["gpipe", "1f1b"]
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Stage:
    """The time and memory of a stage for one micro-batch.

    Attributes:
        forward: the seconds of its forward pass.
        backward: those of its backward pass, recomputation included.
        sent: the bytes that it sends to the next stage; as many come back as gradients.
        kept: the bytes that it holds of each micro-batch from its forward pass to its
            backward pass.
        transient: the further bytes that a pass holds while it runs.
        held: the bytes that it holds all the time: weights, their gradients, and slots
            of an optimizer.
        gradients: the bytes of the gradients that replicas exchange.
    """

    forward: float
    backward: float
    sent: int = 0
    kept: int = 0
    transient: int = 0
    held: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Pipeline:
    """Stages on separate devices, and the schedule of a step through them.

    Attributes:
        stages: the stages, first to last.
        micro_batches: the number of micro-batches of a step, on each replica.
        schedule: "gpipe" runs all forward passes and then all backward passes; "1f1b"
            begins with as many forward passes as there are stages from this one on, and
            then alternates.
        bandwidth: of each link between two devices, in bytes per second.
        latency: the additional time of each message, in seconds.
        speed: the speed of the devices, relative to the times of `stages`.
        replicas: the number of such pipelines that share the batch. After its last
            backward pass each stage sums its gradients with its replicas, in a ring.
    """

    stages: Sequence[Stage]
    micro_batches: int
    schedule: Schedule = "1f1b"
    bandwidth: float = float("inf")
    latency: float = 0.0
    speed: float = 1.0
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse pipelines that cannot run."""
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"{self.schedule!r} is no schedule; pass one of {', '.join(SCHEDULES)}"
            )
        for name in ("micro_batches", "replicas"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is 1 or more, got {getattr(self, name)!r}")
        for name in ("bandwidth", "speed"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is above 0, got {getattr(self, name)!r}")
        if not self.stages:
            raise PlanError("there is no stage: pass one for each device")

    @property
    def devices(self) -> int:
        """The number of devices, replicas included."""
        return len(self.stages) * self.replicas

    def flying(self, stage: int) -> int:
        """Return the most micro-batches that a stage has begun but not ended."""
        if self.schedule == "gpipe":
            return self.micro_batches
        return min(self.micro_batches, len(self.stages) - stage)

    def passes(self, stage: int) -> list[tuple[bool, int]]:
        """Return the passes of a stage in order: pairs (is backward, micro-batch)."""
        count, first = self.micro_batches, self.flying(stage)
        order = [(False, m) for m in range(first)]
        for m in range(count):
            order.append((True, m))
            if first + m < count:
                order.append((False, first + m))
        return order


@dataclass(frozen=True)
class PipelineRun:
    """The time, traffic and memory of a step of a pipeline.

    Attributes:
        pipeline: the pipeline.
        seconds: the time from the first pass to the last, with sums over replicas.
        busy: the seconds for which each stage computes.
        in_flight: the most micro-batches that each stage holds at once.
        peaks: the most bytes that each stage's device holds.
        traffic: the bytes that go over the link behind each stage in a step, both ways.
        exchanged: the bytes that each device sends to replicas of its stage in a step.
    """

    pipeline: Pipeline
    seconds: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    peaks: tuple[int, ...]
    traffic: tuple[int, ...]
    exchanged: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they are idle."""
        if not self.seconds:
            return 0.0
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return max(self.peaks)


def run_pipeline(pipeline: Pipeline) -> PipelineRun:
    """Simulate one step of a pipeline."""
    # A pass begins when the device is free, by the stage's own order, and its inputs
    # have come. Sending takes no time of the device, and a link carries one message
    # after another in each direction. Source: Huang et al., "GPipe", 2018, arXiv
    # 1811.06965; Narayanan et al., "PipeDream", 2019 (1F1B); the ring of replicas sends
    # 2 (r - 1) / r of the gradients (Patarasu and Yuan 2009).
    stages, count = pipeline.stages, pipeline.micro_batches
    orders = [pipeline.passes(stage) for stage in range(len(stages))]
    place = [0] * len(stages)
    free = [0.0] * len(stages)
    # When a pass (stage, micro-batch, is it backward) has its inputs.
    came = {(0, batch, False): 0.0 for batch in range(count)}
    # When the link behind a stage is free, for each direction.
    link_free: dict[tuple[int, bool], float] = {}
    # Each stage goes on as far as it can whenever one beside it has sent something.
    waiting = list(range(len(stages)))
    for stage in waiting:
        for is_backward, batch in orders[stage][place[stage] :]:
            arrival = came.get((stage, batch, is_backward))
            if arrival is None:
                break
            own = stages[stage]
            taken = (own.backward if is_backward else own.forward) / pipeline.speed
            now = free[stage] = max(free[stage], arrival) + taken
            place[stage] += 1
            target = stage - 1 if is_backward else stage + 1
            if target == len(stages):
                came[stage, batch, True] = now
            elif target >= 0:
                link = min(stage, target), is_backward
                begins = max(now, link_free.get(link, 0.0))
                link_free[link] = begins + stages[link[0]].sent / pipeline.bandwidth
                came[target, batch, is_backward] = link_free[link] + pipeline.latency
                waiting.append(target)
    # A ring sums up the gradients of replicas in so many messages of equal size.
    messages = 2 * (pipeline.replicas - 1)
    exchanged = [messages * s.gradients // pipeline.replicas for s in stages]
    summing = [n / pipeline.bandwidth + messages * pipeline.latency for n in exchanged]
    # A pass forwards takes up a micro-batch, one backwards lets go of it.
    taken_up = ([1 - 2 * is_backward for is_backward, _ in order] for order in orders)
    in_flight = [max(accumulate(changes)) for changes in taken_up]
    peaks = (
        s.held + n * s.kept + s.transient
        for s, n in zip(stages, in_flight, strict=True)
    )
    return PipelineRun(
        pipeline,
        max(map(add, free, summing)),
        tuple(count * (s.forward + s.backward) / pipeline.speed for s in stages),
        tuple(in_flight),
        tuple(peaks),
        tuple(2 * count * s.sent for s, _ in pairwise(stages)),
        tuple(exchanged),
    )


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
    """Simulate a program without computing anything, and track the bytes it holds.

    A buffer is held until the last reader of every tensor that shares it has run; a
    fetched one, to the end. While a node runs it holds its inputs, its outputs and its
    temporary bytes. A variable that is changed while it is still to be read has a
    second buffer until it has been read.

    Args:
        program: the nodes and tensors; or a `Pipeline` of devices, of which
            `geutil.memory.executor.run_pipeline` simulates a step.
        order: all nodes, by number, each after its inputs and control inputs. Without
            it, the order of TensorFlow's executor (`execution_order`).
        seed: for `execution_order`.

    Returns:
        The bytes held at each step, and the life of each buffer; of a pipeline, its
        time, bubble, traffic and peaks.

    Raises:
        PredictionError: `order` is not an order of the program's nodes, or none exists.
        PlanError: an order or a seed is passed with a pipeline.

    Cost: linear in nodes and edges; about 5 us for each node.

    Example:
        A chain of three, which never holds more than two tensors:

        >>> from geutil.memory.program import Node, Program
        >>> x = Node("x", "MatMul", outputs=[0])
        >>> y = Node("y", "MatMul", inputs=[0], outputs=[1])
        >>> z = Node("z", "MatMul", inputs=[1], outputs=[2])
        >>> simulate(Program([x, y, z], sizes=[100, 100, 100], fetched=[2])).held
        [100, 200, 200]
    """
    # A pipeline has its order already: that of its schedule.
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
    buffers = Buffers(program)
    for i in order:
        buffers.run(i)
    return buffers.simulation()


def simulate_with_copies(
    program: Program,
    copies: Collection[int],
    seconds: Sequence[float],
    launch: float = 1e-5,
) -> tuple[Simulation, float]:
    """Simulate a device that is fed ahead of time, and copies, in seconds."""
    # The host is busy with a node for the seconds `launch`: one of the device is
    # enqueued, its buffers are allocated then, and those that it read last are free for
    # nodes that are enqueued later. A copy to or from another device begins when the
    # maker of its tensor has run, goes through one channel after the copies before it,
    # and holds its tensor until it has ended; only then its readers are ready.
    nodes, makers = program.nodes, program.makers
    copying = frozenset(copies)
    successors = list(program.successors())
    pending = program.pending()
    ready = deque(i for i, count in enumerate(pending) if not count)
    buffers = Buffers(program)
    # When each node has run; when the host, the device and the channel are free.
    ran = [0.0] * len(nodes)
    now = device = channel = 0.0
    on_the_way: list[tuple[float, int]] = []

    def end(i: int) -> None:
        buffers.end(i)
        for successor in successors[i]:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)

    while ready or on_the_way:
        if not ready:
            now = max(now, on_the_way[0][0])
        while on_the_way and on_the_way[0][0] <= now:
            end(heapq.heappop(on_the_way)[1])
        if not ready:
            continue
        i = ready.popleft()
        now += launch
        buffers.start(i)
        if i in copying:
            made = max((ran[makers[t]] for t in nodes[i].inputs), default=0.0)
            ran[i] = channel = max(now, channel, made) + seconds[i]
            heapq.heappush(on_the_way, (channel, i))
        else:
            ran[i] = device = max(now, device) + seconds[i]
            end(i)
    program.require_done(pending)
    return buffers.simulation(), max(now, device, channel)


def typical(program: Program, seeds: int = SEEDS) -> Simulation:
    """Return the simulation of median peak among some orders, an odd number."""
    runs = [simulate(with_onednn(program, seed), seed=seed) for seed in range(seeds)]
    return sorted(runs, key=lambda run: run.peak)[seeds // 2]


def _check_order(program: Program, order: Sequence[int]) -> None:
    """Raise if an order repeats or lacks a node, or has one before its inputs."""
    nodes, makers = program.nodes, program.makers
    done = [False] * len(nodes)
    for i in order:
        name = nodes[i].name
        if done[i]:
            raise PredictionError(f"the order names '{name}' twice")
        for tensor in nodes[i].inputs:
            maker = makers.get(tensor)
            if maker is None or not done[maker]:
                unmade = f"tensor {tensor}, which no node makes"
                what = unmade if maker is None else f"'{nodes[maker].name}'"
                raise PredictionError(
                    f"the order has '{name}' before what it reads, {what}"
                )
        for control in nodes[i].controls:
            if not done[control]:
                raise PredictionError(
                    f"the order has '{name}' before '{nodes[control].name}', which it "
                    "waits for"
                )
        done[i] = True
    if len(order) < len(nodes):
        missing = nodes[done.index(False)].name
        raise PredictionError(
            f"the order leaves out '{missing}', which the step needs; give all "
            f"{len(nodes)} ops"
        )
