"""Transfers to another device in a plan: what they take, and schedules that have them.

A result that travels is one that "runs again" in the time of the way back, and reads
nothing then. To the planner its op is two nodes: one that computes it, holds it while
it does, and leaves nothing behind; and one that is there right after and may run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients import segments
from geutil.gradients.planner.problem import Problem
from geutil.gradients.planning.step_problem import StepProblem
from geutil.graph import v1_control_flow
from geutil.graph.types import Operation
from geutil.memory.sizes import tensor_bytes

_PROBE = 1 << 26
"""The bytes that are sent to see how fast that is."""
_ROUNDS = 3


@dataclass(frozen=True)
class Transfers:
    """How results travel between the step and another device.

    Attributes:
        device: the other device.
        bandwidth: bytes in a second, one way.
    """

    device: str
    bandwidth: float

    def seconds(self, op: Operation) -> float:
        """Return how long the results of an op are on the way, one way."""
        return sum(map(tensor_bytes, op.outputs)) / self.bandwidth


def transfers_for(
    problem: StepProblem, device: str, bandwidth: float | None
) -> Transfers:
    """Return how results of a step travel to a device, measured if nobody says.

    Args:
        problem: the step.
        device: the other device.
        bandwidth: bytes in a second, one way; None to measure it.

    Raises:
        PlanError: the step runs on that device, or it cannot be told how fast
            transfers are.

    Cost: when measured, that of sending 64 MiB there and back four times.
    """
    ops = {problem.results[node] for node in travelling_nodes(problem)}
    sources = sorted({_kind(op.device) for op in ops if op is not None})
    host = _kind(device)
    others = [source for source in sources if source != host]
    if sources and not others:
        raise PlanError(
            f"the step runs on {_name(host)}, to which its tensors would be sent, so "
            "that nothing would be let go: put the step on an accelerator, name "
            "another offload_device, or plan without offload=True"
        )
    if bandwidth is not None or not others:
        return Transfers(device, bandwidth or 1.0)
    if {kind for kind, _ in (*others, host)} == {"CPU"}:
        raise PlanError(
            f"{_name(others[0])} and {_name(host)} are parts of one memory, where "
            "nothing is copied that could be timed: pass bandwidth= for the devices "
            "that are meant"
        )
    return Transfers(device, _measured_bandwidth(_name(others[0]), _name(host)))


def _kind(device: str) -> tuple[str, int]:
    """Return the type and the number of a device; by default, TensorFlow's choice."""
    spec = tf.DeviceSpec.from_string(device)
    usual = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return spec.device_type or usual, spec.device_index or 0


def _name(kind: tuple[str, int]) -> str:
    return f"/device:{kind[0]}:{kind[1]}"


def _measured_bandwidth(source: str, destination: str) -> float:
    """Return the bytes in a second that go from one device to the other and back."""

    def measure() -> float:
        numbers = np.zeros(_PROBE // 4, np.float32)
        with tf.device(source):
            sent = tf.identity(tf.constant(numbers))
        seconds = []
        for _ in range(_ROUNDS + 1):
            began = perf_counter()
            with tf.device(destination):
                there = tf.identity(sent)
            with tf.device(source):
                back = tf.identity(there)
                # Reading one element waits for all that comes before.
                back[0].numpy()
            seconds.append(perf_counter() - began)
        return 2 * _PROBE / min(seconds[1:])

    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise PlanError(
            "how fast transfers are can be measured only where TensorFlow runs "
            "eagerly: pass bandwidth="
        )
    # A thread of its own is in no graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def travelling_nodes(problem: StepProblem) -> list[int]:
    """Return the nodes whose result can wait elsewhere, in ascending order.

    Those that may run again and leave one buffer behind, that of an op of one output,
    of which all else that they make are views.
    """
    nodes = []
    once = frozenset(problem.problem.no_recompute)
    for node, op in enumerate(problem.results):
        if op is None or node in once or len(op.outputs) != 1:
            continue
        inside = v1_control_flow.is_inside(op)
        if inside or any(map(problem.step.is_helper, problem.ops[node])):
            continue
        if _behind(problem, node) is not None:
            nodes.append(node)
    return nodes


def _behind(problem: StepProblem, node: int) -> tuple[Operation, ...] | None:
    """Return the op of a node's buffer and its views there.

    None if a view reads something else that is computed.
    """
    result = problem.results[node]
    members = frozenset(problem.ops[node])
    behind = [result]
    shown = {result}
    for op in problem.ops[node]:
        if op is result or not any(t.op in shown for t in op.inputs):
            continue
        others = (t.op for t in op.inputs if t.op not in shown)
        if any(o in members or not segments.is_parameter(o) for o in others):
            return None
        shown.add(op)
        behind.append(op)
    return tuple(op for op in behind if op is not None)


def with_transfers(problem: StepProblem, one_way: Mapping[int, float]) -> StepProblem:
    """Return a step's problem in which some results come back instead of running again.

    Args:
        problem: the step's.
        one_way: the nodes whose results do, each with how long that takes.

    Cost: linear in nodes and edges.
    """
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
        tensors=tuple((leaves[node], t) for node, t in problem.tensors),
        returning=returning,
    )
