"""A training step as a problem of the planner, and its schedules as recomputations.

Forward and backward ops are the nodes, views part of their sources; forward ops may run
again, as often as it saves. Ops that a schedule runs again between one backward op and
the next are a segment. A result that is sent to another device and back counts as one
that "runs again" in the time of the way back, and then reads nothing. To the planner
its op is two nodes: one that computes it, holds it meanwhile, and leaves nothing
behind; and one that is there right after and may run again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients import segments
from geutil.gradients.planner.problem import Problem
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps, Recomputation
from geutil.gradients.step import PlainStep
from geutil.gradients.step_order import place_to_wait
from geutil.graph import v1_control_flow
from geutil.graph.op_types import VALUE_BLIND
from geutil.graph.runtime import checked_default, full_name, planned_for
from geutil.graph.types import Operation
from geutil.graph.walks import DisjointSets, closure
from geutil.memory.costs import Times, op_time, tensor_bytes
from geutil.memory.program import Program
from geutil.memory.schedule import frugal_order, negligible_size, with_controls


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A step as a problem of the planner."""

    step: PlainStep
    problem: Problem
    # The ops of each node, in topological order.
    ops: tuple[tuple[Operation, ...], ...]
    # For each node the op that makes all that it leaves behind, if there is one.
    results: tuple[Operation | None, ...] = ()
    # The nodes whose results come back from another device when they run again, each
    # with how long that takes. They are there when they run first.
    returning: Mapping[int, float] = field(default_factory=dict)

    def recomputation(self, runs: Sequence[int]) -> Recomputation:
        """Return the recomputation of a schedule, each op where the schedule has it."""
        backward = frozenset(self.step.backward)
        ran: set[int] = set()
        copies: Counter[Operation] = Counter()
        bursts: list[list[Operation]] = [[]]
        bursts_before: dict[Operation, int] = {}
        places: dict[str, int] = {}
        fetched: dict[Operation, float] = {}
        for place, node in enumerate(runs):
            if node in self.returning:
                if node not in ran:
                    ran.add(node)
                    continue
                # The first op of such a node is the one that its views show.
                fetched[self.ops[node][0]] = self.returning[node]
            for op in self.ops[node]:
                late = bool(bursts_before)
                if node in ran or self._needs_copy(op, node, copies, late=late):
                    places[segments.name_of_copy(op, copies[op])] = place
                    copies[op] += 1
                    bursts[-1].append(op)
                elif op.type not in VALUE_BLIND:
                    places[op.name] = place
            if node not in ran:
                ends_burst = [op for op in self.ops[node] if op in backward]
                if ends_burst and bursts[-1]:
                    bursts.append([])
                bursts_before.update(dict.fromkeys(ends_burst, len(bursts) - 1))
                ran.add(node)
        if not bursts[-1]:
            del bursts[-1]
        places |= {segments.name_of_sent(op): places[op.name] for op in fetched}
        plan = segments.scheduled_recomputation(
            self.step, bursts, bursts_before, fetched
        )
        return replace(plan, places=places)

    def _needs_copy(
        self, op: Operation, node: int, copies: Mapping[Operation, int], *, late: bool
    ) -> bool:
        """Return whether a copy takes the place of the first run of an op."""
        # Helpers that gradient functions make of forward tensors alone run in the
        # forward pass, and read these. Where a schedule has one later, in the backward
        # pass (`late`), it waits itself if it can; many products and sums cannot.
        return (
            node not in self.problem.once
            and self.step.is_helper(op)
            and (
                any(copies[t.op] for t in op.inputs)
                or (late and place_to_wait(op) is None)
            )
        )


def step_problem(
    step: PlainStep,
    always: Keeps,
    step_program: StepProgram,
    time_of: Times = op_time,
) -> StepProblem:
    """Return a step as a problem of the planner."""
    # An op whose result has one reader is part of that reader, if this takes over its
    # buffer or if the result is tiny: then nothing is lost by running both together.
    program = step_program.program(updates_wait=True)
    ops = step_program.ops
    later = step_program.later(program)
    # One that also shows something tiny that is kept (the IdentityN of a swish, its
    # factor) may run again: an op that has to stay as it is stays with all outputs.
    behind = frozenset(segments.recomputable(step, always))
    again = [op in behind and not all(map(always, op.outputs)) for op in ops]
    again += [False] * (len(program.nodes) - len(ops))
    groups = _Groups(program)
    groups.merge_views()
    groups.merge_gradients_of_biases()
    groups.merge_with_readers(again)
    number: dict[int, int] = {}
    for i in frugal_order(with_controls(program, later.items())):
        if groups.leader(i) == i:
            number[i] = len(number)
    place = [number[groups.leader(i)] for i in range(len(program.nodes))]
    waits = {
        (before, place[i])
        for i, node in enumerate(program.nodes)
        for awaited in (*(() if again[i] else node.controls), *later.get(i, ()))
        if not again[awaited] or i in later
        for before in groups.all_before(awaited, place, place[i])
    }
    # Behind each node that others wait for comes one of no size, which they read.
    awaited_places = sorted({before for before, _ in waits})
    new_place = [n + bisect_left(awaited_places, n) for n in range(len(number))]
    count = len(number) + len(awaited_places)
    node_of = [new_place[n] for n in place]
    marks = {n: new_place[n] + 1 for n in awaited_places}
    edges = {(new_place[n], mark) for n, mark in marks.items()}
    edges |= {(marks[before], new_place[after]) for before, after in waits}
    once: set[int] = set(marks.values())
    times_of_nodes, sizes, workspaces = [0.0] * count, [0] * count, [0] * count
    ops_of_nodes: list[list[Operation]] = [[] for _ in range(count)]
    makers_of_nodes: list[list[Operation | None]] = [[] for _ in range(count)]
    for i, node in enumerate(program.nodes):
        own = node_of[i]
        if i < len(ops):
            ops_of_nodes[own].append(ops[i])
            times_of_nodes[own] += time_of(ops[i])
        # `packed` is negative where a kernel fills less than it asks for.
        workspaces[own] = max(workspaces[own], node.temporary + node.packed)
        if not again[i]:
            once.add(own)
        left = sum(program.sizes[t] for t in groups.left_by(i))
        sizes[own] += left
        if left:
            makers_of_nodes[own].append(ops[i] if i < len(ops) else None)
        # A reader of a shape holds nothing: it runs as soon as the tensor is there.
        if node.type not in VALUE_BLIND:
            makers = {m for t in node.inputs for m in groups.makers(t)}
            edges |= {(node_of[m], own) for m in makers}
    # Another input of a view, its shape, may be made behind the buffer that it shows.
    edges = {(a, b) for a, b in edges if a < b}
    outputs = {node_of[m] for t in program.fetched for m in groups.makers(t)}
    problem = Problem(
        times_of_nodes,
        sizes,
        edges,
        no_recompute=sorted(once),
        outputs=outputs,
        workspaces=workspaces,
    )
    results = [makers[0] if len(makers) == 1 else None for makers in makers_of_nodes]
    return StepProblem(step, problem, tuple(map(tuple, ops_of_nodes)), tuple(results))


class _Groups:
    """Nodes of a program that are one node of a problem."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sets = DisjointSets(range(len(program.nodes)))
        self.leader = self._sets.leader
        self._is_used_up = [False] * len(program.nodes)
        self._maker = [0] * len(program.sizes)
        # Of tensors whose buffer another group than their maker's has made.
        self._shown: dict[int, int] = {}
        for i, node in enumerate(program.nodes):
            for t in node.outputs:
                self._maker[t] = i

    def makers(self, tensor: int) -> tuple[int, ...]:
        """Return the node that makes a tensor, and that of a buffer that it shows."""
        shown = self._shown.get(tensor)
        maker = self._maker[tensor]
        return (maker,) if shown is None else (maker, shown)

    def all_before(self, i: int, place: Sequence[int], end: int) -> set[int]:
        """Return the places of the groups that a node has to have behind it."""
        # That of its own group, if that comes before the one that waits (`end`);
        # otherwise, where its group ends later, those of the group's inputs up to it.

        def behind(j: int) -> Iterable[int]:
            if place[j] < end:
                return ()
            return (m for t in self._program.nodes[j].inputs for m in self.makers(t))

        return {place[j] for j in closure([i], behind) if place[j] < end}

    def _groups_of(self, tensor: int) -> list[int]:
        return [self.leader(i) for i in self.makers(tensor)]

    def left_by(self, i: int) -> list[int]:
        """Return the tensors of a node that its group leaves behind."""
        node = self._program.nodes[i]
        shared = {output for output, _ in node.aliases}
        if self._is_used_up[i]:
            return []
        return [t for o, t in enumerate(node.outputs) if o not in shared]

    def merge_views(self) -> None:
        """Put each view into the group of the (first) buffer that it shows."""
        for i, node in enumerate(self._program.nodes):
            # Nothing is left of views of a constant or a variable.
            if not node.aliases or any(self._program.sizes[t] for t in self.left_by(i)):
                continue
            buffers = [self.makers(node.inputs[place])[-1] for _, place in node.aliases]
            if node.inputs[node.aliases[0][1]] not in self._shown:
                self._sets.join(i, buffers[0])
            for (out, _), maker in zip(node.aliases, buffers, strict=True):
                if self.leader(maker) != self.leader(i):
                    self._shown[node.outputs[out]] = maker

    def merge_gradients_of_biases(self) -> None:
        """Put the gradient of a bias into the group of that of its filter."""
        # TensorFlow runs both as one, so that an op that waits for one waits for the
        # other.
        nodes = self._program.nodes
        # The gradient of the result comes last, and is never held anyway.
        filters = {
            node.inputs[-1]: i
            for i, node in reversed(list(enumerate(nodes)))
            if "BackpropFilter" in node.type and node.inputs
        }
        for i, node in enumerate(nodes):
            if node.type == "BiasAddGrad" and node.inputs:
                first = filters.get(node.inputs[0], i)
                self._sets.join(i, first)

    def merge_with_readers(self, again: Sequence[bool]) -> None:
        """Merge groups into those of their only readers, where nothing is lost."""
        # Only of nodes that may all run `again`, or none.
        nodes = self._program.nodes
        small = negligible_size(self._program)
        fetched = {m for t in self._program.fetched for m in self._groups_of(t)}
        members: dict[int, list[int]] = {}
        readers: dict[int, set[int]] = {}
        for i, node in enumerate(nodes):
            members.setdefault(self.leader(i), []).append(i)
            for t in () if node.type in VALUE_BLIND else node.inputs:
                for behind in self._groups_of(t):
                    readers.setdefault(behind, set()).add(i)
        for first, group in members.items():
            outside = {self.leader(r) for r in readers.get(first, ())} - {first}
            if len(outside) != 1 or first in fetched:
                continue
            (reader,) = outside
            if len({again[i] for i in (*group, *members.get(reader, [reader]))}) > 1:
                continue
            # An update uses up its gradient at once; both are there meanwhile. One that
            # waits leaves the gradient there, which may be small next to its inputs.
            ends = not nodes[reader].outputs and not nodes[reader].controls
            if ends or self._loses_nothing(group, first, reader, small):
                self._sets.join(first, reader)
                # The inputs of the group are those of the merged one from now on.
                members.setdefault(reader, [reader]).extend(group)
                for i in () if ends else group:
                    self._is_used_up[i] = True

    def _loses_nothing(
        self, group: Sequence[int], first: int, reader: int, small: int
    ) -> bool:
        """Return whether a group may as well wait for its only reader."""
        # It may if all that it reads and makes is small, or if the reader takes over
        # its buffer and either waits for nothing large besides, or the group's inputs
        # are no larger than its results: then these inputs are held in the meantime.
        node, sizes = self._program.nodes[reader], self._program.sizes
        size = sum(sizes[t] for i in group for t in self.left_by(i))
        read = {
            t
            for i in group
            for t in self._program.nodes[i].inputs
            if first not in self._groups_of(t)
        }
        if size <= small:
            return all(sizes[t] <= small for t in read)
        others = (t for t in node.inputs if first not in self._groups_of(t))
        alone = all(sizes[t] <= small for t in others)
        return (alone or sum(sizes[t] for t in read) <= size) and any(
            sizes[node.outputs[out]] >= size
            and first in self._groups_of(node.inputs[place])
            for out, place in node.reuses
        )


def travel_times(
    problem: StepProblem, device: str, bandwidth: float | None
) -> dict[int, float]:
    """Return the nodes whose result can wait on a device, each with seconds one way."""
    # The bandwidth, in bytes in a second, is measured if it is None.
    results = {node: problem.results[node] for node in _travelling_nodes(problem)}
    ops = {node: op for node, op in results.items() if op is not None}
    usual = planned_for(problem.step.graph)
    sources = sorted({_kind(op.device, usual) for op in ops.values()})
    host = _kind(device, usual)
    others = [source for source in sources if source != host]
    if sources and not others:
        raise PlanError(
            f"the step runs on {_name(host)}, to which its tensors would be sent, so "
            "that nothing would be let go: put the step on an accelerator, name "
            "another offload_device, or plan without offload=True"
        )
    if bandwidth is None and others:
        if {kind for kind, _ in (*others, host)} == {"CPU"}:
            raise PlanError(
                f"{_name(others[0])} and {_name(host)} are parts of one memory, where "
                "nothing is copied that could be timed: pass bandwidth= for the "
                "devices that are meant"
            )
        here = {device.name for device in tf.config.list_logical_devices()}
        if _name(others[0]) not in here:
            raise PlanError(
                f"{_name(others[0])} is not in this machine, so that transfers cannot "
                "be timed: pass bandwidth="
            )
        bandwidth = _measured_bandwidth(_name(others[0]), _name(host))
    speed = bandwidth or 1.0
    return {node: tensor_bytes(op.outputs[0]) / speed for node, op in ops.items()}


def _kind(device: str, usual: str | None) -> tuple[str, int]:
    """Return the type and the number of a device, of `usual` where it names none."""
    default = checked_default(usual, ())
    spec = tf.DeviceSpec.from_string(full_name(device, default))
    return spec.device_type, spec.device_index or 0


def _name(kind: tuple[str, int]) -> str:
    return f"/device:{kind[0]}:{kind[1]}"


def _measured_bandwidth(source: str, destination: str) -> float:
    """Return the measured bytes per second between two devices, each way."""

    def measure() -> float:
        numbers = np.zeros(1 << 24, np.float32)
        with tf.device(source):
            sent = tf.identity(tf.constant(numbers))
        seconds = []
        for _ in range(4):
            began = perf_counter()
            with tf.device(destination):
                there = tf.identity(sent)
            with tf.device(source):
                back = tf.identity(there)
                # Reading one element waits for all that comes before.
                back[0].numpy()
            seconds.append(perf_counter() - began)
        return 2 * numbers.nbytes / min(seconds[1:])

    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise PlanError(
            "how fast transfers are can be measured only where TensorFlow runs "
            "eagerly: pass bandwidth="
        )
    # A thread of its own is in no graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def _travelling_nodes(problem: StepProblem) -> list[int]:
    """Return the nodes whose result can wait elsewhere, in ascending order."""
    # Those that may run again and leave one buffer behind, that of an op of one output,
    # of which all their other results are views.
    return [
        node
        for node, op in enumerate(problem.results)
        if op is not None
        and node not in problem.problem.once
        and len(op.outputs) == 1
        and not v1_control_flow.is_inside(op)
        and not any(map(problem.step.is_helper, problem.ops[node]))
        and _behind(problem, node) is not None
    ]


def _behind(problem: StepProblem, node: int) -> tuple[Operation, ...] | None:
    """Return the op of a node's buffer and its views, if they read nothing computed."""
    result = problem.results[node]
    members = frozenset(problem.ops[node])
    # A dictionary for its order.
    shown = {} if result is None else {result: None}
    for op in problem.ops[node]:
        if op is result or not any(t.op in shown for t in op.inputs):
            continue
        others = (t.op for t in op.inputs if t.op not in shown)
        if any(o in members or not segments.is_parameter(o) for o in others):
            return None
        shown[op] = None
    return tuple(shown)


def with_transfers(problem: StepProblem, one_way: Mapping[int, float]) -> StepProblem:
    """Return a step's problem in which results of `one_way` nodes come back."""
    plain = problem.problem
    # Each such node comes right behind the one that computes it.
    makes: list[int] = []
    count = 0
    for node in range(len(plain)):
        makes.append(count)
        count += 2 if node in one_way else 1
    leaves = [n + (node in one_way) for node, n in enumerate(makes)]
    times, sizes, workspaces = [0.0] * count, [0] * count, [0] * count
    ops: list[tuple[Operation, ...]] = [()] * count
    results: list[Operation | None] = [None] * count
    returning: dict[int, float] = {}
    for node, (make, leave) in enumerate(zip(makes, leaves, strict=True)):
        times[make] = plain.times[node]
        sizes[leave] = plain.sizes[node]
        workspaces[make] = plain.workspaces[node]
        ops[make] = problem.ops[node]
        results[leave] = problem.results[node]
        if node in one_way:
            workspaces[make] += plain.sizes[node]
            times[leave] = returning[leave] = one_way[node]
            ops[leave] = _behind(problem, node) or ()
    edges = [(leaves[a], makes[b]) for a, b in plain.edges]
    edges += [(makes[node], leaves[node]) for node in one_way]
    once = [makes[node] for node in (*plain.no_recompute, *one_way)]
    return replace(
        problem,
        problem=Problem(
            times,
            sizes,
            edges,
            no_recompute=sorted(once),
            outputs=[leaves[node] for node in plain.outputs],
            workspaces=workspaces,
        ),
        ops=tuple(ops),
        results=tuple(results),
        returning=returning,
    )
