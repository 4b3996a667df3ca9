"""Segments of forward ops that run again, and the memory of a step with them.

A step is divided into segments, their members, readers and waits. Its memory is
predicted from that, without building it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

from geutil.gradients.step import (
    PlainStep,
    Recomputation,
    Segment,
    TensorRead,
    forwarded_op,
    long_sums,
    name_of_copy,
    name_of_sent,
    order_of_addition,
    tensors_of,
)
from geutil.gradients.tape.engine import additions
from geutil.graph import adjacency, runtime, types, walks
from geutil.graph.types import IdentityMap, IdentitySet, Operation, Tensor
from geutil.graph.walks import DisjointSets, closure
from geutil.memory import schedule
from geutil.memory.buffers import Simulation
from geutil.memory.costs import known_dims, negligible_bytes, tensor_bytes
from geutil.memory.executor import SEEDS, simulate, typical
from geutil.memory.kernels.cpu import is_held
from geutil.memory.program import Node, Program
from geutil.memory.read import equal_constants, read_ops

_ANYWHERE = frozenset(("",))

_NO_TRANSFERS: Mapping[Operation, float] = MappingProxyType({})


def _awaited(
    step: PlainStep, groups: Sequence[_Group], newest: Mapping[Operation, int]
) -> list[tuple[Operation, ...]]:
    """Return the ops that each segment waits for."""
    # Those are all backward ops between the segment before it on the same device and
    # itself: the ones that depend on that segment, on none needed later, and that no
    # other such op reads. Weight gradients are among them: the executor runs those
    # late, and tensors that they have not read yet cannot be freed. Where there is no
    # such op (in a branch of version 1, which nothing outside can wait for), they are
    # those of the segment before. No wait can close a cycle, since segments only wait
    # for ops that depend on earlier ones.
    # Helpers of gradient functions are on no device.
    devices = [
        frozenset(op.device for op in group.ops) - _ANYWHERE or _ANYWHERE
        for group in groups
    ]
    reading = {read.op for group in groups for read in group.reads}
    joining = _joining(step, reading, newest, devices)
    sinks = _sinks(step, newest, joining)
    last: dict[str, int] = {}
    waits: list[tuple[Operation, ...]] = []
    for stage, places in enumerate(devices):
        # An op on no device in particular may be on any.
        near = last.keys() if places == _ANYWHERE else places | _ANYWHERE
        previous = sorted({last[place] for place in near if place in last})
        awaited = [op for i in previous for op in sinks.get(i, waits[i])]
        if not previous:
            # Backward ops that run before anything is needed again.
            awaited = [
                op
                for op in sinks.get(-1, ())
                if places == _ANYWHERE or op.device in places | _ANYWHERE
            ]
        waits.append(tuple(dict.fromkeys(awaited)) or step.seeds)
        last.update(dict.fromkeys(places, stage))
    return waits


def _sinks(
    step: PlainStep, newest: Mapping[Operation, int], joining: Set[Operation]
) -> dict[int, list[Operation]]:
    """Return the backward ops without readers in their own stage, by stage."""
    edges = step.edges
    sinks: dict[int, list[Operation]] = {}
    for op in edges.awaitable:
        stage = newest[op]
        if op not in joining and all(
            newest[reader] != stage or reader in joining for reader in edges.readers[op]
        ):
            sinks.setdefault(stage, []).append(op)
    return sinks


def _joining(
    step: PlainStep,
    reading: Set[Operation],
    newest: Mapping[Operation, int],
    devices: Sequence[frozenset[str]],
) -> set[Operation]:
    """Return the ops that only combine the results of segments on several devices."""
    # They add up the gradients of tensors that two towers share, and go on from there.
    # A tower that waited for that would wait for the other tower.
    joining: set[Operation] = set()
    if len(frozenset(devices)) < 2:
        return joining

    def are_apart(first: frozenset[str], second: frozenset[str]) -> bool:
        return first.isdisjoint(second) and _ANYWHERE not in (first, second)

    for op, producers in step.edges.producers.items():
        stage = newest[op]
        if op not in reading and any(
            producer in joining
            if newest[producer] == stage
            else newest[producer] >= 0
            and are_apart(devices[newest[producer]], devices[stage])
            for producer in producers
        ):
            joining.add(op)
    return joining


Keeps = Callable[[Tensor], bool]
"""Returns whether a forward tensor is kept until the backward pass has read it."""


def plan_recomputation(
    step: PlainStep, keeps: Keeps, *, spare_last: bool = True
) -> Recomputation:
    """Divide the ops to recompute into segments, given the kept tensors."""
    # A forward tensor that a backward op reads and that is not kept is recomputed: its
    # op, and all ops behind it up to kept tensors, once. Ops connected by tensors that
    # are not kept make up a segment. With `spare_last` the backward pass follows on the
    # forward pass: ops that it starts with would save nothing, run again at once.
    groups = _groups(step, keeps)
    if spare_last and groups and _ends_last(step, groups):
        last = frozenset(groups[0].ops)
        return plan_recomputation(
            step, lambda t: t.op in last or keeps(t), spare_last=False
        )
    direct_reads = [r for r in step.edges.reads if keeps(r.tensor)]
    inputs = [
        IdentitySet(t for op in group.ops for t in op.inputs if keeps(t))
        for group in groups
    ]
    newest = dict.fromkeys(step.backward, -1)
    for stage, group in enumerate(groups):
        for read in group.reads:
            newest[read.op] = max(newest[read.op], stage)
    _raise_along(step, newest)
    return _with_waits(step, groups, direct_reads, inputs, newest)


@dataclass(frozen=True, eq=False)
class _Group:
    """Connected ops, and the reads of their results."""

    ops: list[Operation]
    reads: list[TensorRead]


def _groups(step: PlainStep, keeps: Keeps) -> list[_Group]:
    """Return the groups in the order in which the backward pass needs them."""
    reads = [read for read in step.edges.reads if not keeps(read.tensor)]
    leader = _connected(_behind(reads, keeps), keeps)
    groups: dict[Operation, _Group] = {}
    for read in reads:
        # The reads are in the order of the backward pass.
        group = groups.setdefault(leader[read.tensor.op], _Group([], []))
        group.reads.append(read)
    for op, first in leader.items():
        groups[first].ops.append(op)
    return list(groups.values())


def recomputable(step: PlainStep, keeps: Keeps) -> list[Operation]:
    """Return, sorted topologically, the ops that run again if `keeps` alone decides."""
    reads = [read for read in step.edges.reads if not keeps(read.tensor)]
    return _behind(reads, keeps)


def _behind(reads: Iterable[TensorRead], keeps: Keeps) -> list[Operation]:
    """Return the ops that run again for some reads."""
    roots = (read.tensor.op for read in reads)
    behind = closure(roots, lambda op: (t.op for t in op.inputs if not keeps(t)))
    return adjacency.topological_sort(behind)


def _connected(ops: Sequence[Operation], keeps: Keeps) -> dict[Operation, Operation]:
    """Map each op to a representative of the ops connected with it."""
    groups = DisjointSets(ops)
    members = frozenset(ops)
    for op in ops:
        for t in op.inputs:
            if t.op in members and not keeps(t):
                groups.join(op, t.op)
    return {op: groups.leader(op) for op in ops}


def _ends_last(step: PlainStep, groups: Sequence[_Group]) -> bool:
    """Return whether the forward pass ends in the group that is needed first."""
    place = step.edges.forward
    # Helpers of gradient functions come after it.
    ends = [
        max((place[op] for op in group.ops if not step.is_helper(op)), default=-1)
        for group in groups
    ]
    return ends[0] == max(ends)


def _with_waits(
    step: PlainStep,
    groups: Sequence[_Group],
    direct_reads: Sequence[TensorRead],
    inputs: Sequence[IdentitySet],
    newest: Mapping[Operation, int],
    sources: Sequence[IdentityMap[int]] = (),
    fetched: Mapping[Operation, float] = _NO_TRANSFERS,
) -> Recomputation:
    """Return a recomputation, with the waits of each segment."""
    # `inputs` are the outer inputs of each segment, `newest` the last segment that each
    # op comes after, or -1.
    direct: dict[int, list[TensorRead]] = {}
    for read in direct_reads:
        # A read belongs to the newest segment that its reader depends on.
        direct.setdefault(newest[read.op], []).append(read)
    waits = _awaited(step, groups, newest)
    segments = [
        Segment(
            tuple(group.ops),
            tuple(inputs[stage]),
            tuple(group.reads),
            tuple(direct.get(stage, ())),
            waits[stage],
            sources[stage] if sources else IdentityMap(),
            frozenset(op for op in group.ops if op in fetched),
        )
        for stage, group in enumerate(groups)
    ]
    held = IdentitySet(
        (*(r.tensor for r in direct_reads), *(t for s in segments for t in s.originals))
    )
    kept = sorted(held, key=lambda t: (adjacency.creation_index(t.op), t.value_index))
    return Recomputation(step, tuple(kept), tuple(segments), newest, fetched=fetched)


def scheduled_recomputation(
    step: PlainStep,
    bursts: Sequence[Sequence[Operation]],
    bursts_before: Mapping[Operation, int],
    fetched: Mapping[Operation, float] = _NO_TRANSFERS,
) -> Recomputation:
    """Return a recomputation with each burst of ops at its place in a schedule."""
    # An op may be in several bursts. Readers of its result read that of the latest
    # burst before; ops of the forward pass, that of the forward pass. `bursts_before`
    # counts the bursts before backward ops; ops that need such an op come after them,
    # too.
    stages_of: dict[Operation, list[int]] = {}
    for stage, ops in enumerate(bursts):
        for op in ops:
            stages_of.setdefault(op, []).append(stage)

    def latest(op: Operation, before: int) -> int:
        """Return the last burst of an op among the first ones, or -1."""
        stages = stages_of.get(op, ())
        place = bisect_left(stages, before)
        return stages[place - 1] if place else -1

    newest = {op: bursts_before.get(op, 0) - 1 for op in step.backward}
    _raise_along(step, newest)
    groups = [_Group(list(ops), []) for ops in bursts]
    direct_reads = []
    for read in step.edges.reads:
        stage = latest(read.tensor.op, newest[read.op] + 1)
        if stage < 0:
            direct_reads.append(read)
        else:
            groups[stage].reads.append(read)
    sources: list[types.MutableIdentityMap[int]] = []
    inputs: list[IdentitySet] = []
    for stage, ops in enumerate(bursts):
        members = frozenset(ops)
        read_tensors = IdentitySet(
            t
            for op in ops
            if op not in fetched
            for t in op.inputs
            if t.op not in members
        )
        earlier = ((t, latest(t.op, stage)) for t in read_tensors)
        sources.append(types.MutableIdentityMap((t, s) for t, s in earlier if s >= 0))
        inputs.append(read_tensors)
    return _with_waits(step, groups, direct_reads, inputs, newest, sources, fetched)


def _raise_along(step: PlainStep, newest: dict[Operation, int]) -> None:
    """Propagate stages: a backward op inherits the latest stage of its inputs."""
    edges = step.edges
    rising = True
    while rising:
        for op, producers in edges.producers.items():
            stage = newest[op]
            for producer in producers:
                stage = max(stage, newest[producer])
            newest[op] = stage
        rising = False
        for source, raised in edges.tied:
            if newest[source] > newest[raised]:
                newest[raised] = newest[source]
                rising = True


_BARRIER = Node(
    "barrier", "PlaceholderWithDefault", aliases=((0, 0),), cheap=True, queue=""
)

_NO_PLACES: Mapping[str, int] = MappingProxyType({})

Updates = Literal["none", "in place", "apart"]


def executed(program: Program) -> Simulation:
    """Simulate a program in a usual order of the executor; see `typical`."""
    # Peaks of so many nodes differ by less than a percent.
    orders = 3 if len(program.nodes) > 1000 else SEEDS
    return typical(program, orders)


_known: WeakKeyDictionary[PlainStep, StepProgram] = WeakKeyDictionary()


def program_of(step: PlainStep) -> StepProgram:
    """Return a step as a program, as it was at the first call."""
    program = _known.get(step)
    if program is None:
        program = _known[step] = StepProgram(step)
    return program


@dataclass(eq=False)
class _StepDraft:
    """The program of a step with segments that run again, while they are added."""

    nodes: list[Node]
    sizes: list[int]
    # The numbers of tensors on another device.
    sent: dict[int, int] = field(default_factory=dict)
    # The nodes behind which segments begin, and the copies of tensors in each.
    gates: list[int] = field(default_factory=list)
    copies: list[dict[int, int]] = field(default_factory=list)
    # How often each op has run again.
    turns: Counter[Operation] = field(default_factory=Counter)


class StepProgram:
    """A step with plain gradients as a program, and those of plans made from it."""

    # `updates`, as far as known, use up each gradient: "in place", or "apart", with as
    # many bytes again while they run.

    def __init__(self, step: PlainStep, *, updates: Updates = "none") -> None:
        fetched = [*step.ys, *tensors_of(step.gradients)]
        # As `build_recomputation` does. XLA's own order is taken to hold as little.
        self._ordered = not runtime.is_determinism_enabled()
        ops = adjacency.topological_sort(step.ops(), step.rewired)
        reading = read_ops(
            ops, (), tensor_bytes, step.calls, dims=known_dims, edges=step
        )
        instead = equal_constants(ops, fetched).items()
        nodes = reading.program.nodes
        self._whole = reading.program.merged(
            {reading.places[op]: reading.places[same] for op, same in instead}
        )
        given = len(nodes) - len(ops)
        held = {*range(given), *(reading.places[op] for op in ops if is_held(op))}
        program, place = reading.program.without(held)
        self._nodes = program.with_queues([""] * len(program.nodes)).nodes
        self._sizes = program.sizes
        self._place = {op: place[i] for op, i in reading.places.items() if i in place}
        lost = {t for i in held for t in nodes[i].outputs}
        self._number = {t: n for t, n in reading.tensors.items() if n not in lost}
        self._maxima = reading.maxima
        self._sums = {
            self._place[op]: order_of_addition(step, op)
            for op in long_sums(step)
            if op in self._place
        }
        self._wanted = [n for t in fetched for n in self._numbers([t])]
        self._seeds = step.seeds
        self._starts = [*step.seeds, *step.unawaited_helpers(ops)]
        self._ends = types.unique(y.op for y in step.ys)
        # Who differentiates something large seldom asks for it as well.
        held_tensors = fetched if step.holds_gradients else ()
        self._held = [n for t in held_tensors for n in self._numbers([t])]
        is_updated = updates != "none" and not step.holds_gradients
        updated = step.gradients if is_updated else ()
        self._is_apart = updates == "apart"
        readers = _readers_of_variables(ops) if updated else {}
        handles = step.handles or [None] * len(step.gradients)
        self._updated = [
            (number, readers.get(id(handle), ()))
            for t, handle in zip(updated, handles, strict=False)
            if types.is_tensor(t)
            for number in self._numbers([t])
        ]

    def compact(self) -> StepProgram:
        """Return the step without views and ops of tiny tensors alone."""
        result = copy(self)
        result.leave_tiny_out()
        return result

    def leave_tiny_out(self) -> None:
        """Remove views, and the nodes that read and make tiny tensors alone."""
        # These hold a thousandth of all bytes at most, and peaks change as little. They
        # are half of the nodes of ResNet50, a third of a transformer's.
        sizes, nodes = self._sizes, self._nodes
        tiny = negligible_bytes(sizes, 0.001)
        ends = {
            self._place[op] for op in (*self._starts, *self._ends) if op in self._place
        }
        wanted = frozenset(self._wanted)
        small = {
            i
            for i, node in enumerate(nodes)
            if i not in ends
            and node.temporary <= tiny
            and all(sizes[t] <= tiny for t in (*node.inputs, *node.outputs))
            and wanted.isdisjoint(node.outputs)
        }
        # A node that waits for more than four stays: each of its readers would wait for
        # all.
        program, place = Program(nodes, sizes).without(small, 4)
        program, shown, left = program.without_views({*self._wanted, *self._maxima})
        place = {i: left[n] for i, n in place.items() if n in left}
        made = {t for node in program.nodes for t in node.outputs}
        self._nodes, self._sizes = program.nodes, program.sizes
        self._place = {op: place[i] for op, i in self._place.items() if i in place}
        numbers = ((t, shown.get(n, n)) for t, n in self._number.items())
        self._number = {t: n for t, n in numbers if n in made}
        self._sums = {place[i]: o for i, o in self._sums.items() if i in place}

    @property
    def ops(self) -> list[Operation]:
        """The ops of the nodes, for plain gradients."""
        return list(self._place)

    @property
    def size(self) -> int:
        """The number of nodes of the step with plain gradients, at least 1."""
        return max(len(self._nodes), 1)

    def plain_peak(self) -> int:
        """Return the resident bytes of plain gradients in the executor's order."""
        return self._plain.simulation.resident

    def peak(
        self, segments: Iterable[Segment] = (), places: Mapping[str, int] = _NO_PLACES
    ) -> int:
        """Return the most resident bytes at once in the order of `quick`."""
        return self.quick(segments, places).resident

    def quick(
        self, segments: Iterable[Segment] = (), places: Mapping[str, int] = _NO_PLACES
    ) -> Simulation:
        """Simulate the step, and segments that run again, in one low-memory order."""
        program = self.program(segments)
        if not self._ordered:
            return simulate(program)
        controlled = schedule.with_controls(program, self.later(program).items())
        return schedule.quick_order(controlled, _places_of(program, places))

    def plan(
        self,
        segments: Iterable[Segment] = (),
        places: Mapping[str, int] = _NO_PLACES,
        *,
        ordered: bool = True,
    ) -> schedule.OrderPlan:
        """Return an order of the step, `ordered` or the executor's, with its waits."""
        program = self.on_device(self.program(segments))
        if ordered and self._ordered:
            # Its loops are held to few iterations at once.
            nodes = [node.changed(surge=0) for node in program.nodes]
            program = replace(program, nodes=nodes)
            known = _places_of(program, places)
            return schedule.plan_order(program, later=self.later(program), known=known)
        return schedule.OrderPlan(partial(simulate, program))

    def on_device(self, program: Program) -> Program:
        """Return a program of the step on its device, which may hand out chunks."""
        return replace(program, device=self._whole.device)

    def plain(self, *, holds_gradients: bool) -> schedule.OrderPlan:
        """Return the schedule of plain gradients by the executor."""
        if not holds_gradients or self._held == self._wanted:
            return self._plain
        program = replace(self._whole, fetched=self._wanted)
        return schedule.OrderPlan(partial(executed, program))

    @cached_property
    def _plain(self) -> schedule.OrderPlan:
        program = replace(self._whole, fetched=self._held)
        return schedule.OrderPlan(partial(executed, program))

    def later(self, program: Program) -> dict[int, list[int]]:
        """Map the first nodes of the backward pass to the nodes before them."""
        names = {node.name: i for i, node in enumerate(program.nodes)}
        ys = [names[op.name] for op in self._ends if op.name in names]
        return {names[op.name]: ys for op in self._starts if op.name in names}

    def program(
        self,
        segments: Iterable[Segment] = (),
        *,
        updates_wait: bool = False,
    ) -> Program:
        """Return the step with the ops of some segments run again."""
        # If there are any, sums of gradients are added up as these come. If
        # `updates_wait`, updates that matter wait for all readers of their variables,
        # apart from ops that run again. Otherwise an update may leave the old value
        # behind.
        segments, draft = list(segments), _StepDraft([*self._nodes], [*self._sizes])
        nodes, sizes = draft.nodes, draft.sizes
        self._add_sent(segments, draft)
        for segment in segments:
            self._add_gate(segment, draft)
            back = self._add_returned(segment, draft)
            draft.copies.append(self._add_segment(segment, draft, back))
            draft.turns.update(segment.ops)
        if segments and self._ordered:
            for place, order in self._sums.items():
                _add_in_turn(nodes, sizes, place, order)
        if segments:
            nodes = _pruned(nodes, sizes, self._wanted)
        small = schedule.negligible_size(Program(nodes, sizes))
        nodes += self._updates(small if updates_wait else math.inf)
        if not updates_wait:
            self._read_variables(nodes, sizes, draft.turns)
        return Program(nodes, sizes, self._held)

    def _updates(self, bound: float) -> list[Node]:
        """Return the updates; of more bytes than a bound they wait for all readers."""
        return [
            Node(
                "update",
                "AssignSubVariableOp",
                [number],
                controls=[self._place[op] for op in readers]
                if self._sizes[number] > bound
                else (),
                temporary=self._sizes[number] if self._is_apart else 0,
            )
            for number, readers in self._updated
        ]

    def _read_variables(
        self, nodes: list[Node], sizes: list[int], turns: Mapping[Operation, int]
    ) -> None:
        """Let readers of a variable hold it, in `nodes` (updates last) and `sizes`."""
        # Where a read comes after the update, in the backward pass or in `turns` of ops
        # that run again, the update leaves the old value and makes a buffer for the new
        # one.
        place = {node.name: i for i, node in enumerate(nodes)} if self._updated else {}
        first = len(nodes) - len(self._updated)
        for i, (number, readers) in enumerate(self._updated, first):
            value, renewed = len(sizes), len(sizes) + 1
            sizes += [0, sizes[number]]
            for op in readers:
                names = [name_of_copy(op, turn) for turn in range(turns[op])]
                for j in (place[name] for name in (op.name, *names) if name in place):
                    nodes[j] = nodes[j].changed(inputs=[*nodes[j].inputs, value])
            nodes[i] = nodes[i].changed(outputs=[renewed], updates=[value])
            nodes.append(Node("variable", "ReadVariableOp", outputs=[value]))

    def gradient_bytes(self, backward: Iterable[Operation]) -> list[int]:
        """Return the bytes of the backward pass alone while each of its ops runs."""
        # In graph order, and without the forward tensors that it reads.
        places = [self._place.get(op) for op in backward]
        sizes = [0] * len(self._sizes)
        for place in places:
            if place is not None:
                for number in self._nodes[place].outputs:
                    sizes[number] = self._sizes[number]
        program = Program(self._nodes, sizes, self._held)
        held_bytes = simulate(program, range(len(self._nodes))).held
        return [0 if place is None else held_bytes[place] for place in places]

    def _numbers(self, tensors: Iterable[Tensor]) -> list[int]:
        numbers = (self._number.get(id(t)) for t in tensors)
        return [number for number in numbers if number is not None]

    def _add_sent(self, segments: Iterable[Segment], draft: _StepDraft) -> None:
        """Add the sends to another device."""
        # They count for nothing there.
        nodes, sizes = draft.nodes, draft.sizes
        fetched = (op for s in segments for op in s.ops if op in s.fetched)
        made = {nodes[self._place[op]].outputs[0]: op for op in fetched}
        returned = (t for s in segments for t in s.returned)
        made |= {n: t.op for t in returned for n in self._numbers([t])}
        for number, op in made.items():
            draft.sent[number] = len(sizes)
            nodes.append(Node(name_of_sent(op), "Identity", [number], [len(sizes)]))
            sizes.append(0)

    def _add_gate(self, segment: Segment, draft: _StepDraft) -> None:
        """Add the node behind which a segment begins."""
        waits = [self._place[op] for op in segment.awaited if op in self._place]
        draft.gates.append(len(draft.nodes))
        draft.nodes.append(Node("gate", "NoOp", controls=waits, cheap=True, queue=""))

    def _add_returned(self, segment: Segment, draft: _StepDraft) -> dict[int, int]:
        """Add the returns of kept tensors for a segment; return their numbers."""
        nodes, sizes, sent = draft.nodes, draft.sizes, draft.sent
        back: dict[int, int] = {}
        seeds = [self._place[op] for op in self._seeds if op in self._place]
        for t, begin in segment.returned.items():
            for number in self._numbers([t]):
                back[number] = len(sizes)
                # Before any stage, a return begins as the backward pass does.
                awaited = [draft.gates[begin]] if begin >= 0 else seeds
                outputs = [len(sizes)]
                nodes.append(Node("back", "Identity", [sent[number]], outputs, awaited))
                sizes.append(sizes[number])
        return back

    def _add_segment(
        self, segment: Segment, draft: _StepDraft, back: Mapping[int, int]
    ) -> dict[int, int]:
        """Add the second run of a segment behind its gate; return its copies."""
        # `back` are the tensors that come from another device.
        nodes, sizes, turns = draft.nodes, draft.sizes, draft.turns
        gate = draft.gates[-1]
        copies: dict[int, int] = {}
        for t in segment.kept:
            for number in self._numbers([t]):
                source = segment.sources.get(t, -1)
                held = back.get(number, number)
                if source >= 0:
                    held = draft.copies[source][number]
                copies[number] = len(sizes)
                nodes.append(
                    _BARRIER.changed(
                        inputs=[held], outputs=[len(sizes)], controls=[gate]
                    )
                )
                sizes.append(sizes[number])
        for op in segment.ops:
            if op not in self._place:
                continue
            node = nodes[self._place[op]]
            first = len(sizes)
            # Places of maxima do not travel: the gradient goes on reading the first.
            made = node.outputs[:1] if op in segment.fetched else node.outputs
            for number in made:
                copies[number] = len(sizes)
                sizes.append(sizes[number])
            if op in segment.fetched:
                name, outputs = name_of_copy(op, turns[op]), [first]
                there = [draft.sent[made[0]]]
                nodes.append(Node(name, "Identity", there, outputs, [gate]))
                continue
            # The barriers wait for the gate, so the readers of a copy wait for it, too.
            inputs = [copies.get(number, number) for number in node.inputs]
            nodes.append(
                node._replace(
                    name=name_of_copy(op, turns[op]),
                    inputs=inputs,
                    outputs=range(first, len(sizes)),
                    controls=() if inputs else (gate,),
                )
            )
        changed: dict[int, set[int]] = {}
        for read in segment.reads:
            if read.op not in self._place:
                continue
            numbers = changed.setdefault(self._place[read.op], set())
            for number in self._numbers([read.tensor]):
                numbers.add(number)
                numbers.update({self._maxima.get(number, number)} & copies.keys())
        for place, numbers in changed.items():
            inputs = [copies[n] if n in numbers else n for n in nodes[place].inputs]
            nodes[place] = nodes[place]._replace(inputs=inputs)
        for read in segment.direct if back else ():
            if read.op in self._place:
                place = self._place[read.op]
                numbers = set(self._numbers([read.tensor]))
                inputs = [
                    back.get(n, n) if n in numbers else n for n in nodes[place].inputs
                ]
                nodes[place] = nodes[place]._replace(inputs=inputs)
        return copies


def _places_of(program: Program, places: Mapping[str, int]) -> dict[int, int]:
    """Return the places that nodes have, by number."""
    if not places:
        return {}
    names = ((i, node.name) for i, node in enumerate(program.nodes))
    return {i: places[name] for i, name in names if name in places}


def _pruned(nodes: list[Node], sizes: list[int], roots: list[int]) -> list[Node]:
    """Return the nodes that some root depends on."""
    maker = [0] * len(sizes)
    for place, node in enumerate(nodes):
        for number in node.outputs:
            maker[number] = place
    left = sorted(
        walks.closure(
            (maker[number] for number in roots),
            lambda place: (
                *(maker[number] for number in nodes[place].inputs),
                *nodes[place].controls,
            ),
        )
    )
    new_place = dict(zip(left, range(len(left)), strict=True))
    final = [nodes[place] for place in left]
    for place, node in enumerate(final):
        # Inputs are tensors, whose numbers stay; controls are nodes.
        if node.controls:
            controls = [new_place[control] for control in node.controls]
            final[place] = node._replace(controls=controls)
    return final


def _add_in_turn(
    nodes: list[Node], sizes: list[int], place: int, order: list[int]
) -> None:
    """Replace the node of a sum by one for each pair that is added."""
    node = nodes[place]._replace(reuses=((0, 0),))
    if len(node.inputs) < len(order):
        # Part of it is held anyway.
        return
    numbers = [node.inputs[i] for i in order]
    *pairs, last = additions(len(numbers))
    for first, second in pairs:
        inputs = [numbers[first], numbers[second]]
        nodes.append(node._replace(inputs=inputs, outputs=[len(sizes)]))
        numbers.append(len(sizes))
        sizes.append(sizes[node.outputs[0]])
    nodes[place] = node._replace(inputs=[numbers[i] for i in last])


def _readers_of_variables(ops: Iterable[Operation]) -> dict[int, list[Operation]]:
    """Map the id of each variable's handle to the ops that read its value."""
    readers: dict[int, list[Operation]] = {}
    for op in ops:
        sources = types.unique(forwarded_op(t.op) for t in op.inputs)
        for source in sources:
            if source is not op and source.type == "ReadVariableOp":
                readers.setdefault(id(source.inputs[0]), []).append(op)
    return readers
