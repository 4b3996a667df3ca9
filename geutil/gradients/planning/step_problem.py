"""A training step as a problem of the planner, and its schedules as recomputations.

Forward and backward ops are the nodes, views part of what they show; forward ops may
run again, as often as pays. What a schedule runs again between one backward op and the
next is a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geutil.gradients import costs, segments
from geutil.gradients.planner.problem import Problem
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps, Recomputation
from geutil.gradients.step import PlainStep
from geutil.graph.types import Operation, Tensor
from geutil.memory import scheduling
from geutil.memory.program import Program

_SLOW = 16
"""What moving an element costs, in multiply-adds of a convolution or product."""


def op_time(op: Operation) -> float:
    """Return about how long an op takes, in multiply-adds of a convolution."""
    amount = costs.multiply_adds(op)
    return float(amount if op.type in costs.HEAVY else _SLOW * amount)


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A step as a problem of the planner.

    Attributes:
        step: the step with plain gradients.
        problem: its ops as nodes.
        ops: those of each node, in topological order.
        tensors: those that could be recomputed, each with its node.
    """

    step: PlainStep
    problem: Problem
    ops: tuple[tuple[Operation, ...], ...]
    tensors: tuple[tuple[int, Tensor], ...]

    def recomputation(self, runs: Sequence[int]) -> Recomputation:
        """Return what a schedule recomputes, each op where the schedule has it.

        Args:
            runs: the nodes in the order in which they run.

        Cost: linear in the runs and the edges of the backward pass.
        """
        backward = frozenset(self.step.backward)
        met: set[int] = set()
        bursts: list[list[Operation]] = [[]]
        bursts_before: dict[Operation, int] = {}
        for node in runs:
            if node in met:
                bursts[-1] += self.ops[node]
                continue
            met.add(node)
            ends_burst = [op for op in self.ops[node] if op in backward]
            if ends_burst and bursts[-1]:
                bursts.append([])
            bursts_before.update(dict.fromkeys(ends_burst, len(bursts) - 1))
        if not bursts[-1]:
            del bursts[-1]
        return segments.scheduled_recomputation(self.step, bursts, bursts_before)


def step_problem(
    step: PlainStep,
    always: Keeps,
    step_program: StepProgram,
    times: Mapping[str, float] | None = None,
) -> StepProblem:
    """Return a step as a problem of the planner.

    Args:
        step: the step.
        always: tells which tensors are kept whatever is chosen.
        step_program: the step as numbers.
        times: how long ops take, by name; by default their multiply-adds say.

    Cost: linear in the ops of the step and their edges.
    """
    program, ops = step_program.program(), step_program.ops
    leader = _leaders(program)
    order = scheduling.frugal_order(program)
    number: dict[int, int] = {}
    for i in order:
        number.setdefault(leader[i], len(number))
    node_of = [number[leader[i]] for i in range(len(program.nodes))]
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    node_times, sizes = [0.0] * len(number), [0] * len(number)
    node_ops: list[list[Operation]] = [[] for _ in number]
    edges: set[tuple[int, int]] = set()
    for i, node in enumerate(program.nodes):
        if i < len(ops):
            time = op_time(ops[i]) if times is None else times.get(ops[i].name, 0.0)
            node_times[node_of[i]] += time
            node_ops[node_of[i]].append(ops[i])
        else:
            # An update that is to come: what it makes is gone behind it.
            sizes[node_of[i]] = node.temporary
        shared = {output for output, _ in node.aliases}
        sizes[node_of[i]] += sum(
            program.sizes[t] for o, t in enumerate(node.outputs) if o not in shared
        )
        edges |= {(node_of[maker[t]], node_of[i]) for t in node.inputs}
    # What a view reads besides, its shape, may be made behind the buffer that it shows.
    edges = {(a, b) for a, b in edges if a < b}
    again, tensors = _recomputable(step, always, ops, node_of[: len(ops)])
    once = [node for node in range(len(number)) if node not in again]
    outputs = {node_of[maker[t]] for t in program.fetched}
    problem = Problem(node_times, sizes, edges, no_recompute=once, outputs=outputs)
    return StepProblem(step, problem, tuple(map(tuple, node_ops)), tuple(tensors))


def _leaders(program: Program) -> list[int]:
    """Return, for each node, the one whose buffer it shows, itself if it makes one."""
    leader = list(range(len(program.nodes)))
    maker: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        for t in node.outputs:
            maker[t] = i
    for i, node in enumerate(program.nodes):
        is_view = len(node.aliases) == len(node.outputs) > 0
        if is_view:
            leader[i] = leader[maker[node.inputs[node.aliases[0][1]]]]
    return leader


def _recomputable(
    step: PlainStep, always: Keeps, ops: Sequence[Operation], node_of: Sequence[int]
) -> tuple[set[int], list[tuple[int, Tensor]]]:
    """Return the nodes that may run again, and their tensors."""
    roots = [t.op for _, _, t in segments.forward_inputs(step) if not always(t)]
    behind = frozenset(segments.ops_behind(roots, always))
    free: dict[int, bool] = {}
    tensors = []
    for op, node in zip(ops, node_of, strict=True):
        may = op in behind and not any(always(t) for t in op.outputs)
        free[node] = free.get(node, True) and may
        if may:
            tensors += [(node, t) for t in op.outputs]
    again = {node for node, may in free.items() if may}
    return again, [(node, t) for node, t in tensors if node in again]
