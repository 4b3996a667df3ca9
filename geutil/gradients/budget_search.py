"""The least recomputation whose predicted peak is within a budget.

The planner schedules the step, and may run forward ops again as often as it saves. A
simulation of the whole step evaluates a schedule, since kernels hold more than their
results, and reuse buffers. So the planner is run for several budgets, until the
simulated peak is just within the given one.

To the planner, forward and backward ops are nodes, views part of their sources. Ops
that a schedule runs again between one backward op and the next are a segment. A result
that is sent to another device and back counts as one that "runs again" in the time of
the way back, and then reads nothing. Its op is two nodes: one that computes it, holds
it meanwhile, and leaves nothing behind; and one that is there right after and may run
again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients import segments
from geutil.gradients.barriers import measured_bandwidth
from geutil.gradients.construction import place_to_wait
from geutil.gradients.least_peak import (
    AS_GOOD,
    Trial,
    Trials,
    choose_for_memory,
)
from geutil.gradients.planner.problem import Problem, Schedule
from geutil.gradients.planner.solver import extra_time_bound, schedule_step
from geutil.gradients.plans import Budget
from geutil.gradients.segments import Keeps, StepProgram, Updates, program_of
from geutil.gradients.step import (
    PlainStep,
    Recomputation,
    is_parameter,
    name_of_copy,
    name_of_sent,
)
from geutil.graph import v1_control_flow
from geutil.graph.op_types import VALUE_BLIND
from geutil.graph.runtime import checked_default, full_name, kind_of, planned_for
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import DisjointSets, closure
from geutil.memory.costs import Times, op_time, tensor_bytes
from geutil.memory.program import Program
from geutil.memory.read import device_of
from geutil.memory.schedule import frugal_order, negligible_size, with_controls
from geutil.sizes import size_text

_MOVES_A_NODE, _FEW_MOVES, _MOVES_TIMES_NODES = 960, 160_000, 270_000_000
"""Moves of a search for each node of the problem; at most the second, or as many as
times the nodes are the third. Small problems need more: U-Net at a quarter takes 36.8 %
more time with 160,000, 34.8 % with 480,000 (means of three seeds)."""
_AIM, _MOST = 0.985, 0.99
"""Parts of a budget that are aimed at and accepted: a finished step may hold a percent
more than was planned."""
_SPARE_OF_REGION, _SPARE_OF_REGIONS = 1 / 16, 1 / 8
"""The part of a budget that stays free where an allocator hands out chunks, of one
region and of growing memory: the order that a step has in the end moves the gaps
between them. Encoder and ResNet50, 50 % and 25 %: chunks of 0.98 to 1.08 times, and of
0.98 to 1.15 times the plan."""
_CLOSE = 0.01
"""As a part of the budget: peaks nearer to it make no difference."""


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
                    places[name_of_copy(op, copies[op])] = place
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
        places |= {name_of_sent(op): places[op.name] for op in fetched}
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
        bandwidth = measured_bandwidth(_name(others[0]), _name(host))
    speed = bandwidth or 1.0
    return {node: tensor_bytes(op.outputs[0]) / speed for node, op in ops.items()}


def _kind(device: str, usual: str | None) -> tuple[str, int]:
    """Return the type and the number of a device, of `usual` where it names none."""
    default = checked_default(usual, ())
    spec = tf.DeviceSpec.from_string(full_name(device, default))
    return spec.device_type, spec.device_index or 0


def _name(kind: tuple[str, int]) -> str:
    return f"/device:{kind[0]}:{kind[1]}"


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
        if any(o in members or not is_parameter(o) for o in others):
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


_ANY = Budget(1.0)


class BudgetSearch:
    """Plans one step: the least time within bytes, or the least peak within time."""

    # `others` are choices of kept tensors that are tried besides; `budget` says all but
    # how much. Where nothing is within a budget with `updates` "apart", it is looked
    # for with such in place, and then without any.

    def __init__(
        self,
        step: PlainStep,
        always: Keeps,
        others: Iterable[Sequence[Tensor]] = (),
        budget: Budget = _ANY,
        *,
        updates: Updates = "apart",
    ) -> None:
        self._step, self._always, self._others = step, always, list(others)
        self._budget, self._updates = budget, updates
        device, here = planned_for(step.graph), kind_of(None)
        if budget.measured and kind_of(device) != here:
            raise PlanError(
                f"ops are measured on the {here} of this process, and the step is "
                f"planned for '{device}': plan without measured=True"
            )
        # Transfers take seconds, so that ops have to be measured beside them.
        self.time_of = step.op_times(
            measured=budget.measured or budget.offload, in_seconds=budget.offload
        )
        self._trials = Trials(step, always, updates=updates)

    @cached_property
    def plain_peak(self) -> int:
        """The bytes that plain gradients hold, without updates."""
        return program_of(self._step).plain_peak()

    @cached_property
    def alone(self) -> Trial:
        """The trial of order alone."""
        return self._trials.without()

    @cached_property
    def _time(self) -> float:
        """How long the step takes with plain gradients."""
        return sum(map(self.time_of, self._step.ops()))

    @cached_property
    def problem(self) -> StepProblem:
        """The step as a problem of the planner."""
        return step_problem(
            self._step, self._always, self._trials.program, self.time_of
        )

    @cached_property
    def _problems(self) -> list[StepProblem]:
        """The step's problem, and some in which results may travel."""
        # Those that take longer to compute than to travel both ways, or half or twice
        # as long: ops that run again may need others to run again before them.
        problem, budget = self.problem, self._budget
        if not budget.offload:
            return [problem]
        one_way = travel_times(problem, budget.offload_device, budget.bandwidth)
        times = problem.problem.times
        choices = [
            {n: t for n, t in one_way.items() if 2 * t < worth * times[n]}
            for worth in (0.5, 1.0, 2.0)
        ]
        distinct = [c for i, c in enumerate(choices) if c and c not in choices[:i]]
        return [problem, *(with_transfers(problem, choice) for choice in distinct)]

    @cached_property
    def _with_less(self) -> BudgetSearch:
        """The same search, as if updates held less."""
        return BudgetSearch(
            self._step,
            self._always,
            self._others,
            self._budget,
            updates="in place" if self._updates == "apart" else "none",
        )

    @cached_property
    def _simple(self) -> list[Trial]:
        """Choices that need no planner: that of the least peak, and others."""
        least = self.least_once_again()
        return [self._trials.run(kept) for kept in (*self._others, least.kept) if kept]

    def least_once_again(
        self,
        min_checkpoint_size: int = 0,
        *,
        among_others: bool = False,
        returns: Callable[[Recomputation], Recomputation] | None = None,
        enough: int = 0,
    ) -> Trial:
        """Return the least peak if no op runs more than once again: "memory"."""
        # The mode "memory" leaves updates out, which the trials here may count.
        trials = self._trials if self._updates == "none" else None
        if returns:
            trials = Trials(self._step, self._always, returns=returns, enough=enough)
        return choose_for_memory(
            self._step,
            self._always,
            min_checkpoint_size,
            among_others=among_others,
            others=self._others,
            trials=trials,
        )

    def within(self, limit: int) -> Trial:
        """Return the recomputation of least time within a limit, or raise PlanError."""
        # Tried are the planner's schedules. If none of them is within the budget, so
        # are the choice of the least peak, and others, with as much kept besides as
        # fits.
        if self.alone.peak <= limit:
            return self.alone
        tried = self.tried(limit)
        if self._updates == "none" and all(trial.peak > limit for trial in tried):
            fits = [trial for trial in self._simple if trial.peak <= limit]
            tried += [self._refined(trial, limit) for trial in fits] or self._simple
        best = self._best_within(tried, limit)
        if best is None and self._updates != "none":
            return self._with_less.within(limit)
        if best is None:
            lowest = min([self.alone, *tried], key=lambda trial: trial.peak)
            raise PlanError(
                "no choice of checkpoints was found whose predicted peak is within "
                f"{size_text(limit)}; the least that was found is "
                f"{size_text(lowest.peak)}; pass a larger budget, or a smaller batch"
            )
        if self._updates == "apart" and self._leaves_more(tried[0]):
            # One schedule tells whether a budget for updates in place is worth it.
            worth = 0.75 * self._extra_time(best)
            (first,) = self._with_less.tried(limit, 1)[:1]
            if self._extra_time(first) < worth:
                other = self._with_less.within(limit)
                if self._extra_time(other) < worth:
                    return other
        return replace(best, bound=self._bound(limit, best))

    def tried(self, limit: int, tries: int | None = None) -> list[Trial]:
        """Return the planner's choices for a budget, some with results that travel."""
        aim, most = int((_AIM - self._spare) * limit), self._most(limit)
        plain, *travelling = self._problems
        tried = self._planned(aim, most, plain, tries)
        for problem in travelling:
            # One schedule tells whether it is worth while that results travel.
            first = self._planned(aim, most, problem, 1)
            within = [trial for trial in tried if trial.peak <= most]
            least = min(map(self._extra_time, within), default=math.inf)
            is_shorter = self._extra_time(first[0]) < least
            tried += first
            if is_shorter and tries != 1:
                tried += self._planned(aim, most, problem, tries)
        return tried

    def _refined(self, trial: Trial, limit: int) -> Trial:
        """Return a choice that also keeps as much as fits, by time for bytes."""
        run_again = trial.plan.run_again if trial.plan else ()
        made = (op.outputs[0] for op in run_again if op.outputs)
        tensors = sorted(
            filter(tensor_bytes, made),
            key=lambda t: self.time_of(t.op) / tensor_bytes(t),
            reverse=True,
        )
        best, fits, too_many = trial, 0, len(tensors) + 1
        # As many of the first ones as fit, by halving.
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            more = self._trials.run((*trial.kept, *tensors[:middle]))
            if more.peak <= limit:
                fits, best = middle, min(best, more, key=self._extra_time)
            else:
                too_many = middle
        return best

    def _best_within(self, tried: Sequence[Trial], limit: int) -> Trial | None:
        """Return the choice of least time that keeps a budget, well if that can be."""
        within = [trial for trial in tried if trial.peak <= self._most(limit)]
        return min(
            within or [trial for trial in tried if trial.peak <= limit],
            key=lambda trial: (self._extra_time(trial), trial.peak),
            default=None,
        )

    @cached_property
    def _spare(self) -> float:
        """The part of a limit that is left free for the gaps between chunks."""
        allocator = device_of(planned_for(self._step.graph)).allocator
        if allocator is None:
            return 0.0
        return _SPARE_OF_REGIONS if allocator.grows else _SPARE_OF_REGION

    def _most(self, limit: int) -> int:
        return int((_MOST - self._spare) * limit)

    def _leaves_more(self, trial: Trial) -> bool:
        """Return whether updates leave old values, of which no schedule knows."""
        # Of larger problems, only needed budgets are tried.
        is_small = len(self.problem.problem) <= 2500
        return is_small and trial.peak > (1 + _CLOSE) * trial.scheduled_peak

    def least(self, extra_share: float) -> Trial:
        """Return the recomputation of least peak within a share of the step's time."""
        # Of those that hold hardly more, it is the one of least time.
        most = extra_share * self._time
        planned = {}
        for problem in self._problems:
            schedule = schedule_step(
                problem.problem,
                most,
                _moves_for(problem) // 2,
                objective="peak",
                seed=self._budget.seed,
            )
            planned[self._scheduled(problem, schedule)] = problem
        tried = [*planned, self.alone, *self._simple]
        tried = [trial for trial in tried if self._extra_time(trial) <= most]
        lowest = min(tried, key=lambda trial: trial.peak)
        if lowest is self.alone:
            return lowest
        as_low = int(AS_GOOD * lowest.peak)
        problem = planned.get(lowest, self.problem)
        tried += self._planned(lowest.peak, as_low, problem, 1)
        best = min(
            (trial for trial in tried if trial.peak <= as_low), key=self._extra_time
        )
        return replace(best, bound=self._bound(best.peak, best))

    def _scheduled(self, problem: StepProblem, schedule: Schedule) -> Trial:
        """Return the trial of a schedule."""
        plan = problem.recomputation(schedule.runs)
        return self._trials.scheduled(plan, schedule.peak)

    def _bound(self, limit: int, best: Trial) -> float:
        """Return extra time that every schedule within a limit takes, of the step's."""
        problem = self.problem.problem
        # Transfers are in no bound.
        # To write the program of a larger one down takes long.
        if len(problem) > 6000 or len(self._problems) > 1:
            return 0.0
        # Kernels that take over buffers do better than any schedule can: as much as
        # they save the best one is open to others, too.
        saved = max(best.scheduled_peak - best.peak, 0)
        # The first branch, with its cuts, gives most of the bound in a second or two.
        branches = 1 if len(problem) > 400 else 200
        bound = extra_time_bound(problem, limit + saved, branches=branches)
        extra = self._extra_time(best)
        if best.scheduled_peak:
            # Helpers of gradient functions may run less often than the schedule says.
            bound = min(bound, extra)
        # A choice that is no schedule may take less than any: that bounds nothing.
        return bound / (self._time or 1.0) if bound <= extra else 0.0

    def _planned(
        self, limit: int, most: int, problem: StepProblem, tries: int | None = None
    ) -> list[Trial]:
        """Return the planner's choices for budgets around a limit."""
        # A step holds a little more than the planner's schedule, or less: kernels take
        # over buffers, and ops wait for others, of which the planner knows a part.
        # `most` is the highest peak that is accepted, `tries` the most schedules that
        # are made.
        nodes = max(len(problem.problem), 1)
        # At most eight schedules are made, or as many as have 12,000 nodes, but three.
        tries = tries or min(max(12_000 // nodes, 3), 8)
        tried: list[Trial] = []
        found: list[tuple[int, ...]] = []
        points: list[tuple[float, int]] = []
        asked, low, high = float(limit), 0.0, math.inf
        longer, shorter = math.inf, 0.0
        for attempt in range(tries):
            schedule = schedule_step(
                problem.problem,
                asked,
                _moves_for(problem),
                seed=self._budget.seed + attempt,
                found=found,
            )
            # The next budget is near this one.
            found = [schedule.runs]
            # Also where that is more than was asked for: it may be within the budget.
            trial = self._scheduled(problem, schedule)
            tried.append(trial)
            points.append((asked, trial.peak))
            if trial.peak <= most:
                low, longer = max(low, asked), min(longer, schedule.overhead)
            else:
                # Whoever asks for more than the schedule's own peak may get it again.
                high = min(high, asked, schedule.peak)
                shorter = max(shorter, schedule.overhead)
            fits_well = (1 - _CLOSE) * limit < trial.peak <= most
            # The memory of a step differs by more from its schedule.
            is_between = low and high < (1 + 0.03) * low
            gain = (longer - shorter) / (problem.problem.total_time or 1.0)
            if schedule.status == "infeasible" or (
                gain < 0.005 if is_between else fits_well
            ):
                break
            asked = _next_budget(points, limit)
            if low and not low < asked < high:
                asked = (low + high) / 2
        return tried

    def _extra_time(self, trial: Trial) -> float:
        """Return the time of ops that run again and of transfers, by the ops' times."""
        return trial.plan.extra_time(self.time_of) if trial.plan else 0.0


def _next_budget(points: Sequence[tuple[float, int]], limit: float) -> float:
    """Return the budget to ask for, by the last two and the peaks that came of them."""
    asked, peak = points[-1]
    in_proportion = asked * limit / peak
    # At first a peak is taken to be in proportion. It rather has a part that no budget
    # changes, which two points tell.
    before, peak_before = points[-2] if len(points) > 1 else points[-1]
    if (asked - before) * (peak - peak_before) <= 0:
        return in_proportion
    asked += (limit - peak) * (asked - before) / (peak - peak_before)
    return min(max(asked, in_proportion * 0.7), in_proportion / 0.7)


def _moves_for(problem: StepProblem) -> int:
    """Return how many moves a search makes."""
    nodes = max(len(problem.problem), 1)
    return min(_MOVES_A_NODE * nodes, max(_FEW_MOVES, _MOVES_TIMES_NODES // nodes))
