"""Low-memory schedules of a step, and the control dependencies that enforce them.

In an order that needs little memory nodes that free memory run first, the rest late.
The executor runs any ready op. So each node that makes a large tensor waits for all
nodes that the plan has before it and that hold, make or free a large one: then no more
can be held at that moment than the plan says. Where the plan holds less than may be
held, a node runs before the last of these, as far as there is room for it: several can
run at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from geutil.memory.buffers import Buffers, Simulation
from geutil.memory.executor import joint_order, simulate
from geutil.memory.program import Program

SMALL = 64
"""Tensors below this part of the largest one do not matter for the order."""
_NONE: Mapping[int, Any] = MappingProxyType({})


def negligible_size(program: Program) -> int:
    """Return the largest size of a tensor that does not matter for the order."""
    return max(program.sizes, default=0) // SMALL


def planned_order(program: Program, known: Mapping[int, int] = _NONE) -> Simulation:
    """Simulate a program in the best of `quick_order` and the executor's own order."""
    edges = _Edges(program)
    runs = (simulate(program, edges.usual), _best(edges, known))
    return min(runs, key=lambda run: run.resident)


def quick_order(program: Program, known: Mapping[int, int] = _NONE) -> Simulation:
    """Simulate a program in the better `frugal_order`, with known places or without."""
    return _best(_Edges(program), known)


def _best(edges: _Edges, known: Mapping[int, int]) -> Simulation:
    run = _Scheduler(edges).run()
    around = _Scheduler(edges, known).run() if known else run
    return min(run, around, key=lambda run: run.resident)


def frugal_order(program: Program, known: Mapping[int, int] = _NONE) -> list[int]:
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

    def __init__(self, edges: _Edges, known: Mapping[int, int] = _NONE) -> None:
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


# Small nodes run freely, as long as those left undone add up to a small size, and so do
# those made ahead of the plan: the updates of Adam make two tensors of each weight once
# its moments are known, and the plan has them at the very end.
_PARTS = 100
"""Tensors of less than this part of the peak are small."""
_HARMLESS = 1 << 10
"""Smaller ones are small whatever the peak. With 16 KB steps of small networks held up
to a third more than with 1 KB (changelog)."""
_ROOM = 50
"""This part of the peak may be held besides, so that several nodes run at once."""
_AHEAD = 50
"""This part of the peak may be made of small tensors ahead of the plan, and as much
again of tiny ones. Without a bound Adam's updates of EfficientNetB0 held 1.31 times the
reported peak under the worst schedule (commit 3fc39671)."""

CanWait = Callable[[int], bool]
MayAwait = Callable[[int, int], bool]


@dataclass(frozen=True)
class OrderDependencies:
    """Control dependencies that an order needs besides the edges of a program."""

    # A node and those that it has to wait for, in the order in which they run.
    waits: Sequence[tuple[int, list[int]]]
    # The same for nodes that make something large and cannot wait, nor anything that
    # they come after and that runs late enough.
    unordered: Sequence[tuple[int, list[int]]]


@dataclass
class _Queue:
    """The nodes of one queue that large ones have to wait for."""

    # Those that may still be undone: place, node, bytes if it holds nothing large.
    recent: deque[tuple[int, int, int | None]] = field(default_factory=deque)
    # Those that hold or made something large and must be done.
    pending: list[int] = field(default_factory=list)
    # So many of these, the first ones, do not wait for each other.
    apart: int = 0
    # Those that hold something small and may be undone, and their bytes together.
    loose: list[int] = field(default_factory=list)
    loose_bytes: int = 0

    def before(self, place: int, bound: int) -> list[int]:
        """Return the nodes that must be done if earlier ones may hold so many bytes."""
        while self.recent and self.recent[0][0] < place:
            _, i, small = self.recent.popleft()
            if small is None:
                self.pending.append(i)
            else:
                self.loose.append(i)
                self.loose_bytes += small
        if self.loose_bytes > bound:
            self.pending += self.loose
            # They come before others in the order.
            self.loose, self.loose_bytes, self.apart = [], 0, 0
        return self.pending


_Value = TypeVar("_Value")


def _known(value: _Value, *_: object) -> _Value:
    """Return the first argument; unlike a lambda, it can be pickled."""
    return value


@dataclass(frozen=True, eq=False)
class OrderPlan:
    """An order of a program and its dependencies, both computed on request."""

    # Plans of gradients are only reported until the whole step is planned.

    run: Callable[[], Simulation]
    hold: Callable[[Simulation], OrderDependencies] | None = None

    @cached_property
    def simulation(self) -> Simulation:
        """The program in that order."""
        return self.run()

    @cached_property
    def dependencies(self) -> OrderDependencies:
        """The control dependencies that hold any schedule to it."""
        nothing = OrderDependencies((), ())
        return nothing if self.hold is None else self.hold(self.simulation)

    @property
    def peak(self) -> int:
        """The most bytes that are held at once, in the order of the plan."""
        return self.simulation.peak

    @property
    def program(self) -> Program:
        """The program with edges for all dependencies."""
        return with_controls(self.simulation.program, self.dependencies.waits)


def _always(*_: int) -> bool:
    return True


def plan_order(
    program: Program,
    can_wait: CanWait | None = None,
    may_await: MayAwait = _always,
    later: Mapping[int, Sequence[int]] = _NONE,
    known: Mapping[int, int] = _NONE,
) -> OrderPlan:
    """Return a low-memory schedule and the control dependencies that enforce it."""
    # `later` maps nodes to those that the plan has before them; `known` has the places
    # of nodes in an order that is tried besides. Without `can_wait` all nodes can, and
    # nothing is computed before it is asked for.
    run = partial(_planned, program, later, known)
    hold = partial(_dependencies_of, can_wait or _always, may_await, later)
    if can_wait is None:
        return OrderPlan(run, hold)
    # Nothing that the caller's functions know of is kept with the plan.
    simulation = run()
    return OrderPlan(partial(_known, simulation), partial(_known, hold(simulation)))


def _planned(
    program: Program, later: Mapping[int, Sequence[int]], known: Mapping[int, int]
) -> Simulation:
    """Simulate a program in the best of several orders, some nodes after others."""
    simulation = planned_order(with_controls(program, later.items()), known)
    return replace(simulation, program=program)


def _dependencies_of(
    can_wait: CanWait, may_await: MayAwait, later: Collection[int], run: Simulation
) -> OrderDependencies:
    """Return the dependencies that hold any schedule of a program to a simulation."""
    # In the forward pass few small tensors are left behind, and an op that waits there
    # may round otherwise: oneDNN chooses among kernels by the ops around.
    begin = next((place for place, i in enumerate(run.order) if i in later), 0)
    bound = max(run.peak // _PARTS, _HARMLESS)
    limit = run.peak + run.peak // _ROOM
    return order_dependencies(
        run.program, run.order, bound, can_wait, may_await, begin, limit
    )


def with_controls(
    program: Program, waits: Iterable[tuple[int, Sequence[int]]]
) -> Program:
    """Return a program in which some nodes also wait for others."""
    nodes = list(program.nodes)
    for i, awaited in waits:
        nodes[i] = nodes[i].changed(controls=[*nodes[i].controls, *awaited])
    return replace(program, nodes=nodes)


def order_dependencies(
    program: Program,
    order: Sequence[int],
    bound: int,
    can_wait: CanWait = _always,
    may_await: MayAwait = _always,
    begin: int = 0,
    limit: int = 0,
) -> OrderDependencies:
    """Return the control dependencies that hold memory to that of an order."""
    # Nodes without a queue neither wait nor are waited for; those of one queue wait for
    # each other. For a node that cannot wait, the last one waits that it comes after
    # and that can. Tensors up to `bound` are small; such that are undone while a large
    # one is made add up to no more, counted from the place `begin` on. As far as there
    # is room up to `limit`, nodes run before others that the order has before them.
    nodes, sizes = program.nodes, program.sizes
    edges = _OrderedEdges(program, order)
    earliest = _earliest_places(program, order, edges, limit)
    budget = limit // _AHEAD
    hasty = _hasty(program, order, edges, bound, begin, budget, can_wait)
    readers = _readers(program, {t for node in nodes for t in node.updates})
    queues: dict[str, _Queue] = {}
    waits: dict[int, list[int]] = {}
    unordered: list[tuple[int, list[int]]] = []
    for i in order:
        node = nodes[i]
        if node.queue is None:
            continue
        queue = queues.setdefault(node.queue, _Queue())
        place = edges.place[i]
        tensors = (*node.inputs, *node.outputs)
        buffer_sizes = [sizes[edges.buffer[t]] for t in tensors]
        large = any(size > bound for size in buffer_sizes)
        makes_large = max(edges.made[i]) > bound
        if makes_large or i in hasty:
            pending = queue.before(earliest[place], bound)
            queue.pending = edges.last(pending, queue.apart)
            queue.apart = len(queue.pending)
            # A variable that others read while it changes has two buffers.
            read = [j for t in node.updates for j in readers.get(t, ())]
            before = [*queue.pending, *(j for j in read if edges.place[j] < place)]
            missing = edges.not_before(i, dict.fromkeys(before))
            apart = 0 if read else len(missing)
            waits_itself = missing and can_wait(i)
            permitted = {j for j in missing if may_await(i, j)}
            allowed = permitted if waits_itself else set()
            if allowed:
                awaited = edges.last([j for j in missing if j in allowed], apart)
                edges.before[i] += awaited
                waits.setdefault(i, []).extend(awaited)
            blocked = []
            refused = edges.last([j for j in missing if j not in allowed], apart)
            # A node that it comes after can wait in its place, if that runs late
            # enough, but not for a node that this one must not await.
            stand_ins = [
                k
                for k in edges.between(permitted.intersection(refused), i)
                if nodes[k].queue == node.queue and can_wait(k)
            ]
            for j in reversed(refused):
                places = (
                    k
                    for k in stand_ins
                    if edges.place[j] < edges.place[k] and may_await(k, j)
                )
                stand_in = next(places, None) if j in permitted else None
                if stand_in is None:
                    blocked.append(j)
                elif edges.not_before(stand_in, [j]):
                    edges.before[stand_in].append(j)
                    waits.setdefault(stand_in, []).append(j)
            if blocked:
                unordered.append((i, blocked[::-1]))
        if large or makes_large:
            queue.recent.append((place, i, None))
        elif any(buffer_sizes) and place >= begin:
            queue.recent.append((place, i, sum(buffer_sizes)))
    by_place = sorted(waits.items(), key=lambda wait: edges.place[wait[0]])
    return OrderDependencies(by_place, unordered)


def _hasty(
    program: Program,
    order: Sequence[int],
    edges: _OrderedEdges,
    bound: int,
    begin: int,
    budget: int,
    can_wait: CanWait,
) -> set[int]:
    """Return small nodes that must wait, so that little is made ahead of an order."""
    # A small node may run as soon as its inputs are there, and then hold its results
    # while large nodes run that the order has before it. `budget` is how many bytes may
    # be made ahead, and as many again of tiny tensors; without bound if 0.
    hasty_nodes: set[int] = set()
    if not budget:
        return hasty_nodes
    total = sum(max(sizes) > bound for sizes in edges.made)
    ahead = {tiny: np.zeros(total, np.int64) for tiny in (False, True)}
    # How many of the large nodes come before each one, with all that it needs.
    since = [0] * len(program.nodes)
    number = 0
    for place, i in enumerate(order):
        since[i] = max((since[j] for j in edges.before[i]), default=0)
        amount, most = sum(edges.made[i]), max(edges.made[i])
        if most > bound:
            number += 1
            since[i] = number
        elif amount and since[i] < number and place >= begin:
            bytes_ahead = ahead[most * 16 < bound][since[i] : number]
            over = int(bytes_ahead.max()) + amount > budget
            if over and program.nodes[i].queue is not None and can_wait(i):
                hasty_nodes.add(i)
                since[i] = number
            else:
                bytes_ahead += amount
    return hasty_nodes


def _earliest_places(
    program: Program, order: Sequence[int], edges: _OrderedEdges, limit: int
) -> Sequence[int]:
    """Return for each place of an order before which one all must be done."""
    if not limit:
        return range(len(order))
    # If all before a place are done, and the node there is not, then no more is held
    # than the order has there, and the results from there on.
    buffers = Buffers(program)
    earliest_places: list[int] = []
    # The bytes that would be held if nothing had been made since, the most first.
    room: list[tuple[int, int]] = []
    begin = made_bytes = 0
    for place, i in enumerate(order):
        heapq.heappush(room, (made_bytes - buffers.held, place))
        before = buffers.held
        buffers.start(i)
        if program.nodes[i].updates:
            made_bytes += max(buffers.held - before, program.nodes[i].temporary)
        else:
            made_bytes += sum(edges.made[i])
        while room and made_bytes - room[0][0] > limit:
            begin = max(begin, heapq.heappop(room)[1] + 1)
        begin = max(begin, place - 128)
        earliest_places.append(min(begin, place))
        buffers.end(i)
    return earliest_places


def _readers(program: Program, tensors: Collection[int]) -> dict[int, list[int]]:
    """Map some tensors to the nodes that read them, or forward them."""
    origin = {t: t for t in tensors}
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(program.nodes):
        for t in dict.fromkeys(node.inputs):
            if t in origin:
                readers.setdefault(origin[t], []).append(i)
        for out, place in node.aliases:
            if node.inputs[place] in origin:
                origin[node.outputs[out]] = origin[node.inputs[place]]
    return readers


class _OrderedEdges:
    """The edges of a program and those that are added, along an order."""

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        nodes, sizes = program.nodes, program.sizes
        # The tensor in whose buffer each tensor lies for certain.
        self.buffer = list(range(len(sizes)))
        # The sizes of the buffers that each node makes, temporary bytes last. A
        # buffer taken over by chance is its own: somebody else may still hold it.
        self.made: list[list[int]] = [[] for _ in nodes]
        for i in order:
            shared = {}
            for out, source in nodes[i].aliases:
                shared[nodes[i].outputs[out]] = self.buffer[nodes[i].inputs[source]]
            for tensor, source in shared.items():
                self.buffer[tensor] = source
            own = [sizes[t] for t in nodes[i].outputs if t not in shared]
            self.made[i] = [*own, nodes[i].temporary]
        # The nodes that each one reads or waits for, with those that are added.
        self.before = [list(before) for before in program.needs()]
        self.place = [0] * len(nodes)
        for place, i in enumerate(order):
            self.place[i] = place

    def between(self, firsts: Collection[int], last: int) -> list[int]:
        """Return the nodes before `last` that the order has behind one of `firsts`."""
        # The last of them comes first. Cost, here and below: linear in the nodes
        # between them in the order, and their edges.
        behind = self._behind(last, firsts)
        return sorted(behind, key=self.place.__getitem__, reverse=True)

    def not_before(self, i: int, others: Collection[int]) -> list[int]:
        """Return those of some nodes that a node does not come after in any order."""
        met = self._behind(i, others)
        return [j for j in others if j not in met]

    def last(self, others: Sequence[int], apart: int = 0) -> list[int]:
        """Return those of some nodes that none of the others waits for."""
        # The first `apart` of them wait for none of each other, and come before the
        # rest in the order.
        if len(others) < 2 or apart >= len(others):
            return list(others)
        met: set[int] = set()
        left = []
        for j in sorted(others[apart:], key=self.place.__getitem__, reverse=True):
            if j not in met:
                left.append(j)
                met |= self._behind(j, others, met)
        return [j for j in others[:apart] if j not in met] + left[::-1]

    def _behind(
        self,
        start: int,
        others: Collection[int],
        visited: Collection[int] = frozenset(),
    ) -> set[int]:
        """Return the nodes that one comes after, back to the first of others."""
        if not others:
            return set()
        all_before, place = self.before, self.place
        first = min([place[j] for j in others])
        waiting = [start]
        met: set[int] = set()
        # A walk of its own: each large node of a step asks for several.
        for i in waiting:
            for before in all_before[i]:
                is_new = before not in met and before not in visited
                if is_new and place[before] >= first:
                    met.add(before)
                    waiting.append(before)
        return met
