"""The most that a step can hold under any schedule that its edges allow.

A state of a running step: some ops have ended, some are running, and all that these
need have ended. It holds the buffers whose makers have started and that some reader has
not ended with. Where the readers of each buffer are ordered, the fullest state is the
heaviest closure of a graph with two nodes for each op, "has started" and "has ended":
the one gains the op's results, the other loses its last reads. That few ops run at once
is a price on each of them; any price gives a bound (Lagrange).
"""

# A closure is a set of nodes with all that its nodes require. The heaviest one is one
# side of a minimum cut (Picard, "Maximal closure of a graph and applications to
# combinatorial problems", Management Science 22, 1976), which OR-Tools computes.

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from geutil.errors import ArgumentTypeError, MissingExtraError
from geutil.graph.types import GivenShapes, Tensor
from geutil.memory.buffers import (
    Buffers,
    ProgramBuffer,
    Simulation,
    buffers_of,
    live_scratch,
    live_tensor,
    rounded_up,
)
from geutil.memory.executor import SEEDS, execution_order, simulate
from geutil.memory.kernels.onednn import with_onednn
from geutil.memory.program import Program
from geutil.memory.step_prediction import executed_step
from geutil.memory.timeline import LiveTensor, largest_lines
from geutil.sizes import size_text

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def heaviest_closure(requires: tuple[Ints, Ints], weights: Ints) -> tuple[int, Flags]:
    """Return the weight of the heaviest closure, and its nodes, by a maximum flow."""
    # Of each pair in `requires`, the first node cannot be taken without the second.
    try:
        from ortools.graph.python import max_flow
    except ImportError as error:
        raise MissingExtraError(
            "the worst case of a step is computed by OR-Tools, which is not installed; "
            "run: pip install 'geutil[plan]'"
        ) from error
    flow = max_flow.SimpleMaxFlow()
    count = len(weights)
    source, sink = count, count + 1
    gains, losses = np.nonzero(weights > 0)[0], np.nonzero(weights < 0)[0]
    most = int(weights[gains].sum())
    tails = [np.full(len(gains), source), losses, requires[0]]
    heads = [gains, np.full(len(losses), sink), requires[1]]
    capacities = [weights[gains], -weights[losses], np.full(len(requires[0]), most + 1)]
    flow.add_arcs_with_capacity(
        np.concatenate(tails).astype(np.int32),
        np.concatenate(heads).astype(np.int32),
        np.concatenate(capacities).astype(np.int64),
    )
    # Nodes without an arc do not exist.
    flow.add_arc_with_capacity(source, sink, 0)
    flow.solve(source, sink)
    in_closure = np.zeros(count + 2, np.bool_)
    in_closure[flow.get_source_side_min_cut()] = True
    return most - int(flow.optimal_flow()), in_closure[:count]


def has_solver() -> bool:
    """Return whether OR-Tools is installed."""
    return find_spec("ortools") is not None


THREADS = 8
"""How many ops run at once, unless somebody says otherwise."""
_SCHEDULES = SEEDS
"""How many schedules on one thread, and on all, tell the bytes of gaps: among them are
those of `predict`. Eight others took no more: ResNet50 and others of measured.md."""


@dataclass(frozen=True)
class WorstCase:
    """The largest memory of a step under any schedule.

    Attributes:
        peak: an upper bound in bytes for all schedules. Where an allocator hands out
            chunks, it includes `gaps`.
        reached: the bytes of the fullest schedule that was found.
        threads: the most ops that run at once; None: no limit.
        tensors: the buffers that are held in the state found, largest first.
        ended: the ops that have ended in that state, in an order that leads to it.
        running: the ops that are running in that state.
        gaps: the bytes of `peak` by which chunks exceed requests. Nothing is proven of
            them but that a chunk is less than twice its buffer: they are the most at
            any moment of several simulated schedules, on one thread and on all, and
            need not coincide with the most that buffers take. 0 where the device has no
            chunks.
    """

    peak: int
    reached: int
    threads: int | None
    tensors: tuple[LiveTensor, ...]
    ended: tuple[str, ...]
    running: tuple[str, ...]
    gaps: int = 0

    @property
    def is_exact(self) -> bool:
        """True if the bound is reached."""
        return self.peak == self.reached

    def __str__(self) -> str:
        ops = "any number of ops" if self.threads is None else f"{self.threads} ops"
        reached = "" if self.is_exact else f", {size_text(self.reached)} are reached"
        gaps = f", {size_text(self.gaps)} of it in chunks' gaps" if self.gaps else ""
        headline = (
            f"at most {size_text(self.peak)}{gaps} under any schedule, {ops} at once"
            f"{reached}"
        )
        return "\n".join([headline, *largest_lines(self.tensors)])


@tf.autograph.experimental.do_not_convert
def worst_case(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    shapes: GivenShapes | None = None,
    threads: int | None = THREADS,
    grappler: bool = True,
    onednn: bool | None = None,
    device: str | None = None,
) -> WorstCase:
    """Return the most that a step can hold under any schedule that its edges allow.

    TensorFlow runs the ops of a step in an order that depends on threads, on the load
    of the machine and on addresses. This bounds the memory of any order, and finds one
    that holds much. The step is first optimized as by a Session; buffers are counted as
    by `predict`.

    Args:
        ys_or_fetches: the fetches of the step, as in `predict`; or a `Program`, which
            is used as it is, and with which only `threads` applies.
        feeds: as in `predict`.
        shapes: as in `predict`.
        threads: how many ops may run at once; None: no limit.
        grappler: as in `predict`.
        onednn: as in `predict`.
        device: as in `predict`. For a GPU the bound is in its allocator's chunks: that
            of the buffers, rounded as it rounds them, plus `WorstCase.gaps`. Workspaces
            of cuDNN and cuBLAS are left out.

    Returns:
        The bound, a state that is reached, and the way to it.

    Raises:
        ArgumentTypeError: a fetch is neither an op nor a tensor of a graph, or
            `threads` is not a number from 1 up.
        SelectionError: the fetches belong to different graphs.
        PredictionError: as `predict` does.
        MissingExtraError: OR-Tools is not installed.

    Cost: about 0.5 ms for each op to prepare the step, most of it Grappler's; then
        about 20 minimum cuts: 0.3 s in all for 5,000 ops, 4 s for 20,000. Gaps take
        about 0.2 ms more for each op.

    Source: Picard, "Maximal closure of a graph and applications to combinatorial
        problems", 1976.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import predict, worst_case
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, [1000, 1000])
        ...     sums = [tf.reduce_sum(tf.matmul(x, k * x)) for k in (2.0, 3.0)]
        >>> predict(sums).peak
        8000004
        >>> worst_case(sums, threads=2).peak
        16000000
    """
    check_threads(threads)
    if isinstance(ys_or_fetches, Program):
        return worst_of(ys_or_fetches, threads)
    step = executed_step(ys_or_fetches, feeds, shapes, grappler, onednn, device)
    return worst_of(with_onednn(step.program), threads)


def check_threads(threads: Any) -> None:
    """Raise ArgumentTypeError unless it is a number from 1 up, or None."""
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ArgumentTypeError(f"threads is a number from 1 up, got {threads!r}")


def worst_of(program: Program, threads: int | None = THREADS) -> WorstCase:
    """Return the most that a program can hold under any schedule; see `worst_case`."""
    # An allocator of chunks rounds up each request.
    rounded = rounded_up if program.device.allocator else int
    nodes = [
        # In the worst case, all iterations that may run at once do.
        node.changed(temporary=rounded(node.temporary + node.surge), surge=0)
        for node in program.nodes
    ]
    sizes = [rounded(size) for size in program.sizes]
    program = replace(program, nodes=nodes, sizes=sizes)
    states = _States(program, threads)
    states.search()
    worst = states.result()
    if not program.device.allocator:
        return worst
    gaps = _most_in_gaps(program, threads)
    return replace(worst, peak=worst.peak + gaps, gaps=gaps)


def _most_in_gaps(program: Program, threads: int | None) -> int:
    """Return the most by which chunks exceed buffers in several schedules."""
    at_once = len(program.nodes) if threads is None else threads
    runs = [simulate(program, seed=seed) for seed in range(_SCHEDULES)]
    runs += [
        simulate_side_by_side(program, at_once, seed) for seed in range(_SCHEDULES)
    ]
    pairs = (zip(run.chunks, run.held, strict=True) for run in runs)
    return max((chunks - held for pair in pairs for chunks, held in pair), default=0)


def simulate_side_by_side(program: Program, threads: int, seed: int) -> Simulation:
    """Simulate a program of which several nodes run at once, in a random schedule."""
    # A node starts as soon as a thread is free; which of those that run ends next is
    # random, and so is which ready one starts: the one that became so first, or the
    # last. Scratch memory counts as a tensor without readers.
    # As probable as these it is that a free thread starts a node before another ends
    # one, and the one that waits longest: several of 8 threads are busy then.
    rng = random.Random(seed)
    program = _with_scratch_as_tensors(program)
    successors = list(program.successors())
    pending = program.pending()
    ready = deque(i for i, count in enumerate(pending) if not count)
    running: list[int] = []
    buffers = Buffers(program)
    while ready or running:
        is_free = len(running) < threads
        if ready and is_free and (not running or rng.random() < 0.7):
            started = ready.popleft() if rng.random() < 0.5 else ready.pop()
            buffers.start(started)
            running.append(started)
            continue
        ended = running.pop(rng.randrange(len(running)))
        buffers.end(ended)
        for successor in successors[ended]:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
    program.require_done(pending)
    return buffers.simulation()


def _with_scratch_as_tensors(program: Program) -> Program:
    """Return a program in which scratch memory is a result that nobody reads."""
    sizes = list(program.sizes)
    nodes = []
    for node in program.nodes:
        if node.temporary:
            outputs = [*node.outputs, len(sizes)]
            sizes.append(node.temporary)
            node = node.changed(outputs=outputs, temporary=0)
        nodes.append(node)
    return replace(program, nodes=nodes, sizes=sizes)


class _States:
    """Bounds on the states of one program, and the fullest state so far."""

    def __init__(self, program: Program, threads: int | None) -> None:
        self._program = program
        self._threads = threads
        self._count = len(program.nodes)
        self._buffers = buffers_of(program)
        # Pairs of "has started", i, and "has ended", i + the number of nodes, of which
        # the first requires the second.
        pairs = [(i + self._count, i) for i in range(self._count)]
        for i, before in enumerate(program.needs()):
            pairs += [(i, j + self._count) for j in before]
        firsts, seconds = np.array(pairs, np.int64).reshape(-1, 2).T
        self._requires = firsts, seconds
        self._usual = execution_order(program)
        # Buffers that several nodes may be the last to read. Whether it is freed is no
        # sum over these; between "when a node that follows all of them starts" (0) and
        # "a buffer for each that has not ended" (1), each share is a bound.
        self._shared = [b for b in self._buffers if len(b.last) > 1]
        self._shares = np.zeros(len(self._shared))
        self._bound: int | None = None
        self._most = -1
        self._order: list[int] = []
        self._running: list[int] = []
        self._held: list[ProgramBuffer] = []

    def search(self) -> None:
        """Lower the bound and search for fuller states, until they meet."""
        price, low, high = 0, 0, max(self._program.sizes, default=0)
        for round_ in range(16):
            started, ended = self._cut(price)
            running = int((started & ~ended).sum())
            bound = self._bound or 0
            if bound - self._most <= 0.002 * bound:
                return
            self._adjust_shares(started, ended, 1.0 / (1 + round_ // 2))
            # A price is needed only where more nodes run than there are threads.
            if self._threads is None or (price == 0 and running <= self._threads):
                continue
            low, high = (price, high) if running > self._threads else (low, price)
            price = (low + high) // 2

    def result(self) -> WorstCase:
        """Return the worst case that was found."""
        nodes, running = self._program.nodes, self._running
        tensors = [live_tensor(self._program, b.tensor) for b in self._held]
        tensors += [live_scratch(nodes[i]) for i in running if nodes[i].temporary]
        return WorstCase(
            peak=max(self._bound or 0, self._most),
            reached=self._most,
            threads=self._threads,
            tensors=tuple(sorted(tensors, key=lambda t: -t.bytes)),
            ended=tuple(nodes[i].name for i in self._order),
            running=tuple(nodes[i].name for i in running),
        )

    def _weights(self, price: int) -> Ints:
        """Return the bytes that each start and each end adds, at a price of running."""
        count = self._count
        weights = np.zeros(2 * count, np.int64)
        for i, node in enumerate(self._program.nodes):
            # The price is paid from the start of a node to its end.
            weights[i] += node.temporary - price
            weights[i + count] += price - node.temporary
        for buffer in self._buffers:
            weights[buffer.maker] += buffer.bytes
            # Buffers with several last readers have a share, below.
            if len(buffer.last) == 1:
                weights[buffer.last[0] + count] -= buffer.bytes
        for buffer, share in zip(self._shared, self._shares, strict=True):
            part = int(share * buffer.bytes)
            weights[buffer.maker] += part * (len(buffer.last) - 1)
            if buffer.gone is not None:
                weights[buffer.gone] -= buffer.bytes - part
            for i in buffer.last:
                weights[i + count] -= part
        return weights

    def _cut(self, price: int) -> tuple[Flags, Flags]:
        """Return which nodes have started and ended in the fullest state at a price."""
        bound, in_closure = heaviest_closure(self._requires, self._weights(price))
        bound += price * (self._threads or 0)
        self._bound = bound if self._bound is None else min(bound, self._bound)
        started, ended = np.split(in_closure, 2)
        self._note(started, ended)
        return started, ended

    def _adjust_shares(self, started: Flags, ended: Flags, step: float) -> None:
        """Adjust each share to the number of last readers that are still to end."""
        for place, buffer in enumerate(self._shared):
            if started[buffer.maker]:
                pending = sum(not ended[i] for i in buffer.last)
                gone = buffer.gone is not None and started[buffer.gone]
                share = self._shares[place] - step * (pending - (not gone))
                self._shares[place] = min(1.0, max(0.0, share))

    def _note(self, started: Flags, ended: Flags) -> None:
        """Measure a state, with the fullest of the nodes that run in it."""
        nodes, sizes = self._program.nodes, self._program.sizes
        order = [i for i in self._usual if ended[i]]
        running = [i for i in self._usual if started[i] and not ended[i]]
        made = {i: sum(sizes[t] for t in nodes[i].outputs) for i in running}
        # Of the nodes that may run at once, the threads run those that add most.
        running.sort(key=lambda i: -(nodes[i].temporary + made[i]))
        running = running[: self._threads]
        buffers = Buffers(self._program)
        for i in order:
            buffers.start(i)
            buffers.end(i)
        for i in running:
            buffers.start(i)
        if buffers.held > self._most:
            self._most, self._order, self._running = buffers.held, order, running
            begun, done = {*order, *running}, frozenset(order)
            self._held = [
                b
                for b in self._buffers
                if b.maker in begun and not (b.last and done.issuperset(b.last))
            ]
