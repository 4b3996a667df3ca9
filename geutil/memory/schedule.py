"""Low-memory orders of a step: nodes that free memory first, the rest late."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from geutil.memory.buffers import Buffers, Simulation
from geutil.memory.executor import joint_order, simulate
from geutil.memory.program import Program

SMALL = 64
"""Tensors below this part of the largest one do not matter for the order."""
_NONE_KNOWN: Mapping[int, int] = MappingProxyType({})


def negligible_size(program: Program) -> int:
    """Return the largest size of a tensor that does not matter for the order."""
    return max(program.sizes, default=0) // SMALL


def planned_order(
    program: Program, known: Mapping[int, int] = _NONE_KNOWN
) -> Simulation:
    """Simulate a program in the best of `quick_order` and the executor's own order."""
    edges = _Edges(program)
    runs = (simulate(program, edges.usual), _best(edges, known))
    return min(runs, key=lambda run: run.resident)


def quick_order(program: Program, known: Mapping[int, int] = _NONE_KNOWN) -> Simulation:
    """Simulate a program in the better `frugal_order`, with known places or without."""
    return _best(_Edges(program), known)


def _best(edges: _Edges, known: Mapping[int, int]) -> Simulation:
    run = _Scheduler(edges).run()
    around = _Scheduler(edges, known).run() if known else run
    return min(run, around, key=lambda run: run.resident)


def frugal_order(program: Program, known: Mapping[int, int] = _NONE_KNOWN) -> list[int]:
    """Return the nodes in a low-memory order, maybe around known places of some."""
    # A node that holds no more than before runs as soon as it can. So does one whose
    # large result the nodes behind it use up at once: a weight gradient and its update,
    # which then run in one burst (with Adam's updates; without bursts an encoder holds
    # 17 % more). If there is no such node, that with the longest way to the end runs:
    # the end of a shorter way, to be added to the result of a longer one, would be held
    # in the meantime. (List scheduling by critical path, Coffman and Graham 1972, after
    # all free nodes.)
    # Around `known` places, of which several nodes may have the same, other nodes that
    # make no more than the largest tensor that they read run right behind their inputs,
    # and so do those that no node needs; the rest just before the first node that needs
    # them. An update of a variable comes behind the readers of its old value.
    return list(_Scheduler(_Edges(program), known).run().order)


class _Edges:
    """A program and the relations of its edges that all schedules ask for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.readers = program.readers()
        self.successors = list(program.successors(self.readers))
        self.sorted = self._sorted()
        sizes = program.sizes
        self.made = [sum([sizes[t] for t in node.outputs]) for node in program.nodes]
        self._fetched = frozenset(program.fetched)
        self.behind: list[frozenset[int] | None] = [None] * len(program.nodes)
        for i in reversed(self.sorted):
            self.behind[i] = self._closure(i)
        for i, closure in enumerate(self.behind):
            if closure and max(self.made[j] for j in closure) > self.made[i]:
                self.behind[i] = None

    def _sorted(self) -> list[int]:
        """Return the nodes in a topological order."""
        pending = self.program.pending()
        order = [i for i, count in enumerate(pending) if not count]
        for i in order:
            for j in self.successors[i]:
                pending[j] -= 1
                if not pending[j]:
                    order.append(j)
        # The executor names a node that waits for itself.
        return order if len(order) == len(pending) else self.usual

    @cached_property
    def usual(self) -> list[int]:
        """The order of TensorFlow's executor."""
        devices = [0] * len(self.program.nodes)
        return joint_order(self.program, devices, successors=self.successors)

    def _closure(self, i: int) -> frozenset[int] | None:
        """Return all readers of a node's results, direct or not, for a burst."""
        # None if these are more than a burst has, or if something is fetched.
        sizes, behind = self.program.sizes, self.behind
        closure: set[int] = set()
        for t in self.program.nodes[i].outputs:
            if t in self._fetched:
                return None
            for reader in self.readers[t] if sizes[t] else ():
                further = behind[reader]
                if further is None:
                    return None
                closure.update(further, (reader,))
        return frozenset(closure) if len(closure) < 64 else None


class _Scheduler:
    """List scheduling of one program: free nodes first, or around `known` places."""

    def __init__(self, edges: _Edges, known: Mapping[int, int] = _NONE_KNOWN) -> None:
        program = edges.program
        self._greedy, self._program, self._edges = not known, program, edges
        self._rank: Sequence[float] = (
            _ranks_around(edges, known) if known else _ranks(edges)
        )
        self._buffers = Buffers(program)
        self._small = negligible_size(program)
        # The tensors in a buffer that are still to be read, where there are several.
        self._sharing: dict[int, dict[int, None]] = {}
        self._left = list(self._buffers.reads)
        nodes = program.nodes
        self._renewing: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            for tensor in node.updates:
                self._renewing.setdefault(tensor, []).append(i)
        # Nodes whose burst has to wait until a variable is read, by its old buffer.
        self._blocked: dict[int, set[int]] = {}
        self._pending = program.pending()
        self._ready: list[tuple[bool, float, int]] = []
        self._waiting = [False] * len(nodes)
        # Nodes that hold more, as far as is known.
        self._grows = [True] * len(nodes)

    def run(self) -> Simulation:
        """Simulate the program in its order."""
        for i, count in enumerate(self._pending):
            if not count:
                self._offer(i)
        while self._ready:
            i = heapq.heappop(self._ready)[-1]
            # Offered again since, and run.
            if not self._waiting[i]:
                continue
            burst = self._greedy and self._is_growing(i) and self._used_up(i)
            for j in burst or (i,):
                self._add(j)
        return self._buffers.simulation()

    def _offer(self, i: int) -> None:
        is_new = not self._waiting[i]
        self._waiting[i] = True
        grows = not self._greedy or (self._is_growing(i) and self._used_up(i) is None)
        # Nodes come to hold less as others end, never more.
        if is_new or not grows:
            self._grows[i] = grows
            heapq.heappush(self._ready, (grows, self._rank[i], i))

    def _is_growing(self, i: int) -> bool:
        small = self._small
        return self._edges.made[i] > small and self._buffers.growth(i) > small

    def _add(self, i: int) -> None:
        self._waiting[i] = False
        # A node that has run is never ready again.
        self._pending[i] = -1
        successors = self._edges.successors[i]
        for j in successors:
            self._pending[j] -= 1
        changed = self._changed_by(i)
        for j in dict.fromkeys(successors):
            if not self._pending[j]:
                self._offer(j)
        for j in changed if self._greedy else ():
            if self._waiting[j] and self._grows[j]:
                self._offer(j)

    def _changed_by(self, i: int) -> list[int]:
        """Run a node; return the nodes that may now free more: the last readers."""
        buffers, inputs = self._buffers, self._program.nodes[i].inputs
        for tensor, source in buffers.run(i):
            self._sharing.setdefault(source, {source: None})[tensor] = None
        changed: list[int] = []
        for tensor in inputs:
            self._left[tensor] -= 1
            if not self._left[tensor]:
                self._sharing.get(buffers.buffer[tensor], {}).pop(tensor, None)
        for source in {buffers.buffer[tensor] for tensor in inputs}:
            holders = buffers.holders[source]
            if not holders and source in self._renewing:
                changed += self._renewing[source]
                changed += self._blocked.pop(source, ())
            # A node seldom reads a tensor more often than three times.
            if 0 < holders <= 3 and self._program.sizes[source] > self._small:
                for other in self._sharing.get(source, [source]):
                    changed += self._edges.readers[other]
        return changed

    def _used_up(self, i: int) -> list[int] | None:
        """Return a node and those behind it that use up all their results, in order."""
        # None if another node reads them, too, or if one reads a tensor besides that is
        # not there yet, if a larger one is made on the way, or if a variable is changed
        # on the way that others are still to read.
        closure = self._edges.behind[i]
        if closure is None:
            return None
        successors, pending = self._edges.successors, self._pending
        burst: list[int] = []
        left: dict[int, int] = {}
        waiting = [i]
        while waiting:
            # Depth first, so that one branch is used up before the next begins.
            j = waiting.pop()
            burst.append(j)
            for after in successors[j]:
                rest = left[after] = left.get(after, pending[after]) - 1
                # An op that only waits (for all updates, say) is no part of it.
                if not rest and after in closure:
                    waiting.append(after)
        if len(burst) <= len(closure):
            return None
        waits = {b for j in burst for b in self._buffers.still_read(j, burst)}
        for buffer in waits:
            self._blocked.setdefault(buffer, set()).add(i)
        return None if waits else burst


def _ranks(edges: _Edges) -> list[int]:
    """Return the rank of each node, the longest way to the end first."""
    ranks = [0] * len(edges.sorted)
    for i in reversed(edges.sorted):
        ranks[i] = min([ranks[j] for j in edges.successors[i]], default=0) - 1
    return ranks


def _ranks_around(edges: _Edges, known: Mapping[int, int]) -> Sequence[float]:
    """Return the known places, and those of other nodes; see `frugal_order`."""
    usual, successors = edges.sorted, edges.successors
    last = len(usual) + max(known.values())
    ranks: list[float] = [known.get(i, last) for i in range(len(usual))]
    for i in reversed(usual):
        if i not in known:
            ranks[i] = min((ranks[j] for j in successors[i]), default=last)
    behind: list[float] = [known.get(i, 0) for i in range(len(usual))]
    for i in usual:
        for j in successors[i]:
            if j not in known:
                behind[j] = max(behind[j], behind[i])
    nodes, sizes = edges.program.nodes, edges.program.sizes
    for i, node in enumerate(nodes):
        largest = max((sizes[t] for t in node.inputs), default=-1)
        if i not in known and (edges.made[i] <= largest or ranks[i] == last):
            ranks[i] = behind[i]
    renewed = {t for node in nodes for t in node.updates}
    read_last: dict[int, float] = {}
    for i, node in enumerate(nodes):
        for t in renewed.intersection(node.inputs):
            read_last[t] = max(read_last.get(t, 0), ranks[i])
    for i, node in enumerate(nodes):
        if i not in known and node.updates:
            # To wait for readers of the old value holds no more than to leave it there.
            ranks[i] = max(ranks[i], *(read_last.get(t, 0) + 0.5 for t in node.updates))
    return ranks
