"""The memory of a step that recomputes by some plan, without building it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

from geutil.gradients.segments import Segment, name_of_copy, name_of_sent, source_of
from geutil.gradients.step import PlainStep, long_sums, order_of_addition, tensors_of
from geutil.gradients.tape.engine import additions
from geutil.graph import runtime, walks
from geutil.graph.adjacency import topological_sort
from geutil.graph.types import Operation, Tensor, is_tensor, unique
from geutil.memory.buffers import Simulation
from geutil.memory.costs import known_dims, negligible_bytes, tensor_bytes
from geutil.memory.cpu import is_held
from geutil.memory.executor import SEEDS, simulate, typical
from geutil.memory.program import Node, Program
from geutil.memory.read import equal_constants, read_ops
from geutil.memory.schedule import (
    OrderPlan,
    negligible_size,
    plan_order,
    quick_order,
    with_controls,
)

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


class StepProgram:
    """A step with plain gradients as a program, and those of plans made from it."""

    # `updates`, as far as known, use up each gradient: "in place", or "apart", with as
    # many bytes again while they run.

    def __init__(self, step: PlainStep, *, updates: Updates = "none") -> None:
        fetched = [*step.ys, *tensors_of(step.gradients)]
        # As `build_recomputation` does. XLA's own order is taken to hold as little.
        self._ordered = not runtime.is_determinism_enabled()
        ops = topological_sort(step.ops(), step.rewired)
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
        self._ends = unique(y.op for y in step.ys)
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
            if is_tensor(t)
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
        controlled = with_controls(program, self.later(program).items())
        return quick_order(controlled, _places_of(program, places))

    def plan(
        self,
        segments: Iterable[Segment] = (),
        places: Mapping[str, int] = _NO_PLACES,
        *,
        ordered: bool = True,
    ) -> OrderPlan:
        """Return an order of the step, `ordered` or the executor's, with its waits."""
        program = self.on_device(self.program(segments))
        if ordered and self._ordered:
            # Its loops are held to few iterations at once.
            nodes = [node.changed(surge=0) for node in program.nodes]
            program = replace(program, nodes=nodes)
            known = _places_of(program, places)
            return plan_order(program, later=self.later(program), known=known)
        return OrderPlan(partial(simulate, program))

    def on_device(self, program: Program) -> Program:
        """Return a program of the step on its device, which may hand out chunks."""
        return replace(program, device=self._whole.device)

    def plain(self, *, holds_gradients: bool) -> OrderPlan:
        """Return the schedule of plain gradients by the executor."""
        if not holds_gradients or self._held == self._wanted:
            return self._plain
        program = replace(self._whole, fetched=self._wanted)
        return OrderPlan(partial(executed, program))

    @cached_property
    def _plain(self) -> OrderPlan:
        program = replace(self._whole, fetched=self._held)
        return OrderPlan(partial(executed, program))

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
        nodes = list(self._nodes)
        sizes = list(self._sizes)
        segments = list(segments)
        copies: list[dict[int, int]] = []
        turns: Counter[Operation] = Counter()
        sent = self._add_sent(segments, nodes, sizes)
        gates: list[int] = []
        for segment in segments:
            gates.append(self._add_gate(segment, nodes))
            back = self._add_returned(segment, nodes, sizes, gates, sent)
            copies.append(
                self._add_segment(
                    segment, nodes, sizes, copies, turns, sent, back, gates[-1]
                )
            )
            turns.update(segment.ops)
        if segments and self._ordered:
            for place, order in self._sums.items():
                _add_in_turn(nodes, sizes, place, order)
        if segments:
            nodes = _pruned(nodes, sizes, self._wanted)
        small = negligible_size(Program(nodes, sizes))
        nodes += self._updates(small if updates_wait else math.inf)
        if not updates_wait:
            self._read_variables(nodes, sizes, turns)
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

    def _add_sent(
        self, segments: Iterable[Segment], nodes: list[Node], sizes: list[int]
    ) -> dict[int, int]:
        """Add the sends to another device; return each tensor's number there."""
        # They count for nothing there.
        sent: dict[int, int] = {}
        fetched = (op for s in segments for op in s.ops if op in s.fetched)
        made = {nodes[self._place[op]].outputs[0]: op for op in fetched}
        returned = (t for s in segments for t in s.returned)
        made |= {n: t.op for t in returned for n in self._numbers([t])}
        for number, op in made.items():
            sent[number] = len(sizes)
            nodes.append(Node(name_of_sent(op), "Identity", [number], [len(sizes)]))
            sizes.append(0)
        return sent

    def _add_gate(self, segment: Segment, nodes: list[Node]) -> int:
        """Add the node behind which a segment begins; return its number."""
        waits = [self._place[op] for op in segment.awaited if op in self._place]
        nodes.append(Node("gate", "NoOp", controls=waits, cheap=True, queue=""))
        return len(nodes) - 1

    def _add_returned(
        self,
        segment: Segment,
        nodes: list[Node],
        sizes: list[int],
        gates: Sequence[int],
        sent: Mapping[int, int],
    ) -> dict[int, int]:
        """Add the returns of kept tensors for a segment; return their numbers."""
        back: dict[int, int] = {}
        seeds = [self._place[op] for op in self._seeds if op in self._place]
        for t, begin in segment.returned.items():
            for number in self._numbers([t]):
                back[number] = len(sizes)
                # Before any stage, a return begins as the backward pass does.
                awaited = [gates[begin]] if begin >= 0 else seeds
                outputs = [len(sizes)]
                nodes.append(Node("back", "Identity", [sent[number]], outputs, awaited))
                sizes.append(sizes[number])
        return back

    def _add_segment(
        self,
        segment: Segment,
        nodes: list[Node],
        sizes: list[int],
        earlier: Sequence[dict[int, int]],
        turns: Mapping[Operation, int],
        sent: Mapping[int, int],
        back: Mapping[int, int],
        gate: int,
    ) -> dict[int, int]:
        """Add the second run of a segment behind its gate; return its copies."""
        # `earlier` are the copies in each segment before, `turns` counts the earlier
        # runs of ops, `sent` are tensors on another device, `back` those that come from
        # there.
        copies: dict[int, int] = {}
        for t in segment.kept:
            for number in self._numbers([t]):
                source = segment.sources.get(t, -1)
                held = back.get(number, number)
                if source >= 0:
                    held = earlier[source][number]
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
                nodes.append(Node(name, "Identity", [sent[made[0]]], outputs, [gate]))
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
        sources = unique(source_of(t.op) for t in op.inputs)
        for source in sources:
            if source is not op and source.type == "ReadVariableOp":
                readers.setdefault(id(source.inputs[0]), []).append(op)
    return readers
