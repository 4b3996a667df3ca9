"""Partitions and placements: ops put on devices.

A partition cuts the forward pass of a model into stages, one for each device; a
placement moves the ops that a caller names. A pipelined step is measured on the devices
of its partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from geutil.errors import (
    ArgumentTypeError,
    PredictionError,
    SelectionError,
    TransformError,
)
from geutil.gradients.step import tensors_of
from geutil.graph import adjacency, edits, op_types, types
from geutil.graph.runtime import colocation_names
from geutil.graph.types import GivenShapes, IdentitySet, Operation, Tensor, is_stateful
from geutil.memory.by_device import device_peaks
from geutil.memory.costs import op_time, tensor_bytes
from geutil.memory.executor import Pipeline, PipelineRun, Schedule, Stage, run_pipeline
from geutil.pipeline.stage_memory import (
    Floats,
    SequenceCut,
    StageMemory,
    cut_sequence,
    held_bytes,
    is_handle,
    lower_largest,
    stage_memory,
    variable_bytes,
)
from geutil.select import selections
from geutil.select.networks.layers import Origins
from geutil.select.walks import (
    ControlOutputs,
    get_backward_walk_ops,
    get_forward_walk_ops,
)
from geutil.sizes import size_text

Balance = Literal["memory", "time"]
BALANCES = ("memory", "time")
_SHOWN = 4
"""How many notes are printed."""


@dataclass(frozen=True, eq=False)
class PartitionStage:
    """The part of a step that one device computes.

    Attributes:
        device: the device.
        ops: the ops, in topological order.
        cost: the balanced cost: bytes, or multiply-adds of a convolution.
        sent: the tensors of this or earlier stages that later stages read.
        sent_bytes: their bytes.
    """

    device: str
    ops: tuple[Operation, ...] = field(repr=False)
    cost: float
    sent: tuple[Tensor, ...] = field(repr=False)
    sent_bytes: int


@dataclass(frozen=True, eq=False)
class Partition:
    """A forward pass cut into stages.

    Attributes:
        stages: the stages, first to last.
        balance: the balanced cost, "memory" or "time".
        bound: a lower bound of the largest stage in any partition into as many stages.
        unplaced: ops that may change state and read the forward pass, but do not
            contribute to the tensors, and so get no device.
    """

    stages: tuple[PartitionStage, ...]
    balance: Balance
    bound: float
    unplaced: tuple[Operation, ...] = field(default=(), repr=False)

    @property
    def largest(self) -> float:
        """The cost of the largest stage."""
        return max(stage.cost for stage in self.stages)

    @property
    def gap(self) -> float:
        """The fraction by which the largest stage exceeds the bound."""
        return self.largest / self.bound - 1 if self.bound else 0.0

    def apply(self) -> None:
        """Assign the ops to their devices; gradients that are built later follow them.

        Raises:
            TransformError: an op has another device already. Nothing is changed then.
            StaleGraphError, FinalizedGraphError: the graph cannot be edited any more.

        Cost: linear in the ops.
        """
        devices = {op: stage.device for stage in self.stages for op in stage.ops}
        for op, device in devices.items():
            if op.device not in ("", device):
                raise TransformError(
                    f"'{op.name}' is on '{op.device}' already and belongs to the stage "
                    f"of '{device}'; build the graph without tf.device around it"
                )
        if devices:
            edits.set_devices(next(iter(devices)).graph, devices)

    def __str__(self) -> str:
        """Return the partition as lines: the whole, the stages, ops that have none."""
        head = f"{len(self.stages)} stages by {self.balance}"
        largest = f"largest {self._amount(self.largest)}"
        lines = [f"{head}, {largest}, {self.gap:.1%} above the bound"]
        for stage in self.stages:
            names = ", ".join(f"'{t.name}'" for t in stage.sent[:3])
            more = f" and {len(stage.sent) - 3} more" if len(stage.sent) > 3 else ""
            sent = f"; sends {size_text(stage.sent_bytes)}: {names}{more}"
            lines.append(
                f"  {stage.device}: {len(stage.ops)} ops, {self._amount(stage.cost)}"
                + (sent if stage.sent else "")
            )
        lines += [
            f"  no device: '{op.name}' ({op.type}), which is not behind the tensors"
            for op in self.unplaced[:3]
        ]
        if len(self.unplaced) > 3:
            lines.append(f"  no device: {len(self.unplaced) - 3} more")
        return "\n".join(lines)

    def _amount(self, cost: float) -> str:
        if self.balance == "memory":
            return size_text(int(cost))
        return f"{cost:.3g} multiply-adds"


@tf.autograph.experimental.do_not_convert
def partition(
    ys: Any,
    devices: Sequence[str],
    balance: Balance = "memory",
    *,
    micro_batches: int = 1,
    slack: float = 0.02,
    schedule: Schedule = "1f1b",
    recompute: bool = True,
    shapes: GivenShapes | None = None,
) -> Partition:
    """Cut the forward pass behind some tensors into stages for a pipeline.

    Every tensor is read in its own stage or a later one. Of all cuts of the topological
    order of the ops, this minimizes the largest stage and, within the slack, the
    traffic. Ops that read neither data nor random numbers (variables, their reads,
    constants) are in the stage that reads them first; ops that share a variable, or are
    colocated, are in one stage.

    "time" counts the time of each op by the planner's cost model. "memory" counts the
    predicted peak of each stage in a training step of `geutil.gradients.pipelined`:
    variables, their gradients and constants; the kept tensors of the micro-batches in
    flight; and the memory of its passes of one micro-batch, simulated. The largest
    stage is minimized by estimates for all stretches, and then lowered by simulations
    of stretches near it.

    Args:
        ys: the tensors, such as the loss; or a graph, for its floating-point results
            that depend on data. The graph is that of one micro-batch.
        devices: one for each stage, first to last.
        balance: "memory" or "time".
        micro_batches: the number of micro-batches of a step.
        slack: the fraction by which the largest stage may grow to save traffic.
        schedule: "1f1b" or "gpipe"; determines how many micro-batches are in flight.
        recompute: whether stages recompute their forward tensors in backward passes.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs; "memory" needs them. Traffic and "time" assume 32 for each.

    Returns:
        The partition; nothing is changed until `apply`.

    Raises:
        ArgumentTypeError: `devices` is not a list of texts, or `micro_batches` below 1.
        SelectionError: an unknown balance, `ys` are of several graphs, or a graph has
            no such result.
        PlanError: there are more devices than places to cut, an unknown schedule, or,
            with "memory", no gradient.
        PredictionError: sizes that "memory" needs depend on open dimensions.

    Cost: with "time", linear in ops and edges, about 100 ms for 5,000 ops. With
        "memory", that of `tf.gradients`, the square of the places to cut in numpy, and
        about a hundred simulations of the step: a minute for ResNet152, with 6,000 ops.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform import partition
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, [100, 100])
        ...     for _ in range(8):
        ...         x = tf.matmul(x, x)
        >>> found = partition(x, ["/cpu:0", "/cpu:1"], "time")
        >>> [len(stage.ops) for stage in found.stages], found.gap
        ([5, 4], 0.0)
    """
    if isinstance(devices, str) or not all(isinstance(d, str) for d in devices):
        raise ArgumentTypeError(f"devices is a list of names, got {devices!r}")
    if micro_batches < 1:
        raise ArgumentTypeError(f"micro_batches is 1 or more, got {micro_batches!r}")
    if balance not in BALANCES:
        raise SelectionError(f"{balance!r} is no balance; pass 'memory' or 'time'")
    flights = _flights(len(devices), micro_batches, schedule)
    tensors = _targets(ys)
    line = _Line(get_backward_walk_ops(tensors, control_inputs=True))
    if balance == "memory":
        memory = line.memory(tensors, flights, recompute, shapes)
        return line.by_memory(memory, devices, slack)
    return line.by_time(devices, slack)


def even_split(
    ys: Any,
    devices: Sequence[str],
    micro_batches: int,
) -> Partition:
    """Cut the forward pass into stages of as many ops, to compare with."""
    tensors = _targets(ys)
    line = _Line(get_backward_walk_ops(tensors, control_inputs=True))
    flights = _flights(len(devices), micro_batches, "1f1b")
    return line.evenly(line.memory(tensors, flights, True), devices)


def _targets(ys: Any) -> list[Tensor]:
    """Return tensors of one graph; of a graph the results of its data."""
    tensors: list[Tensor] = selections.make_list_of_t(ys)
    if types.is_graph(ys):
        origins = Origins(ys)
        tensors = [t for t in tensors if _is_result(t) and not origins.is_parameter(t)]
        if not tensors:
            raise SelectionError(
                "the graph has no number that depends on data and that nothing reads; "
                "pass the loss"
            )
    selections.graph_of_all(tensors)
    return tensors


def _is_result(tensor: Tensor) -> bool:
    """Return whether nothing reads an op, and it makes numbers without changing any."""
    # Of a fused norm some outputs are never read.
    op = tensor.op
    is_read = any(t.consumers() for t in op.outputs)
    changes = is_stateful(op) or types.is_reference(tensor)
    return tensor.dtype.is_floating and not is_read and not changes


def _flights(stages: int, micro_batches: int, schedule: Schedule) -> list[int]:
    """Return the number of micro-batches that each stage has in flight."""
    pipeline = Pipeline([Stage(1.0, 1.0)] * stages, micro_batches, schedule)
    return [pipeline.flying(s) for s in range(stages)]


class _Line:
    """The ops of a forward pass in a line that can be cut in some places."""

    def __init__(self, ops: Sequence[Operation]) -> None:
        self._ops = adjacency.topological_sort(ops)
        inside = frozenset(self._ops)
        self._fixed = self._without_data()
        moving = [op for op in self._ops if op not in self._fixed]
        self._place = {op: i for i, op in enumerate(moving)}
        self._readers = {
            op: [r for r in adjacency.successors(op) if r in inside] for op in self._ops
        }
        end = max(len(moving) - 1, 0)
        self._place |= dict.fromkeys(self._fixed, end)
        self._length = end + 1
        self._groups = self._together()
        # Groups may pull more along, until nothing moves.
        while self._move_forward():
            pass
        starts = self._cut_places()
        numbers = list(accumulate(int(i in starts) for i in range(self._length)))
        self._piece = {op: numbers[i] - 1 for op, i in self._place.items()}
        self.count = len(starts)

    def _without_data(self) -> frozenset[Operation]:
        """Return placeholders, variables, constants, and ops on these alone."""
        fixed: set[Operation] = set()
        roots = op_types.PLACEHOLDERS | op_types.VARIABLES | {"Const"}
        data: set[Operation] = set()
        for op in self._ops:
            before = [*(t.op for t in op.inputs), *adjacency.control_inputs(op)]
            is_root = op.type in roots
            # A placeholder of data moves to its readers, and the ops on it do not.
            if op.type in op_types.PLACEHOLDERS and not is_handle(op):
                data.add(op)
            reads_only = op.type == "ReadVariableOp" or not any(map(is_handle, before))
            follows = bool(before) and all(b in fixed and b not in data for b in before)
            if is_root or (follows and reads_only):
                fixed.add(op)
        return frozenset(fixed)

    def _together(self) -> list[list[Operation]]:
        """Return the groups of ops that share a variable, or are colocated."""
        by_name = {op.name: op for op in self._ops}
        groups: dict[str, dict[Operation, None]] = {}
        for op in self._ops:
            names = colocation_names(op)
            names += [t.op.name for t in op.inputs if is_handle(t.op)]
            for name in names:
                group = groups.setdefault(name, {})
                group[op] = None
                if name in by_name:
                    group[by_name[name]] = None
        return [list(group) for group in groups.values()]

    def _move_forward(self) -> bool:
        """Move ops without data to first readers and groups; return whether any did."""
        before = sum(self._place.values())
        for op in reversed(self._ops):
            if op in self._fixed:
                after = (self._place[r] for r in self._readers[op])
                self._place[op] = min((self._place[op], *after))
        for group in self._groups:
            first = min(self._place[op] for op in group)
            self._place.update((op, first) for op in group if op in self._fixed)
        return sum(self._place.values()) < before

    def _cut_places(self) -> set[int]:
        """Return the places where a piece may begin; groups are in one piece."""
        change = [0] * (self._length + 1)
        for group in self._groups:
            places = [self._place[op] for op in group]
            change[min(places) + 1] += 1
            change[max(places) + 1] -= 1
        inside = list(accumulate(change))
        return {i for i in range(self._length) if not i or not inside[i]}

    def by_time(self, devices: Sequence[str], slack: float) -> Partition:
        """Return the best partition by the time of ops."""
        taken = [0.0] * self.count
        for op in self._ops:
            taken[self._piece[op]] += op_time(op) if op not in self._fixed else 0
        cut = self._cut_by(taken, len(devices), slack)
        bound = max(sum(taken) / len(devices), *taken)
        found = self._stages(cut.ends, cut.costs, devices)
        return Partition(found, "time", bound, self._unplaced())

    def _cut_by(self, taken: Sequence[float], stages: int, slack: float) -> SequenceCut:
        """Return the best cut by sums of the costs of pieces."""
        sums = np.array([0.0, *accumulate(taken)])

        def row(_: int, start: int) -> Floats:
            return sums[start + 1 :] - sums[start]

        # Slack is used only where it saves traffic.
        parts = dict.fromkeys((0.0, slack))
        crossing = self._crossing()
        cuts = [cut_sequence(crossing, stages, row, slack=part) for part in parts]
        return min(cuts, key=lambda cut: cut.traffic)

    def evenly(self, memory: StageMemory, devices: Sequence[str]) -> Partition:
        """Return the partition into stages of as many ops, with their peaks."""
        counts = [0.0] * self.count
        for piece in self._piece.values():
            counts[piece] += 1
        ends = self._cut_by(counts, len(devices), 0.0).ends
        stretches = enumerate(pairwise((0, *ends)))
        peaks = [memory.peak(s, i, j) for s, (i, j) in stretches]
        found = self._stages(ends, peaks, devices)
        return Partition(found, "memory", memory.bound, self._unplaced())

    def memory(
        self,
        ys: Sequence[Tensor],
        flights: Sequence[int],
        again: bool,
        shapes: GivenShapes | None = None,
    ) -> StageMemory:
        """Return the memory of stretches in a training step."""
        held = [0.0] * self.count
        for op in self._ops:
            held[self._piece[op]] += held_bytes(op)
        return stage_memory(
            ys, self._piece, self._fixed, held, flights, again=again, shapes=shapes
        )

    def by_memory(
        self, memory: StageMemory, devices: Sequence[str], slack: float
    ) -> Partition:
        """Return the best partition by peaks: by estimates, and then simulated."""
        rows, peak = cache(memory.estimates), cache(memory.peak)
        # The first has the least traffic.
        tried = [
            lower_largest(
                cut_sequence(self._crossing(), len(devices), rows, slack=part).ends,
                peak,
                memory.least,
            )
            for part in (slack, 0.0)
        ]
        least = min(max(costs) for _, costs in tried)
        ends, costs = next(t for t in tried if max(t[1]) <= least * (1 + slack))
        found = self._stages(ends, costs, devices)
        return Partition(found, "memory", memory.bound, self._unplaced())

    def _unplaced(self) -> tuple[Operation, ...]:
        """Return stateful ops that read the forward pass and have no stage."""
        data = [op for op in self._ops if op not in self._fixed]
        if not data:
            return ()
        controls = ControlOutputs(data[0].graph)
        ahead = get_forward_walk_ops(data, control_outputs=controls)
        return tuple(
            op
            for op in adjacency.graph_order(ahead)
            if op not in self._piece and is_stateful(op) and op.type != "ReadVariableOp"
        )

    def _last(self, tensor: Tensor) -> int:
        """Return the last piece that reads a tensor."""
        readers = adjacency.consumers(tensor)
        pieces = (self._piece[r] for r in readers if r in self._piece)
        return max(pieces, default=self._piece[tensor.op])

    def _crossing(self) -> list[float]:
        """Return the bytes that cross each place between pieces."""
        change = [0.0] * (self.count + 2)
        for op, piece in self._piece.items():
            for t in op.outputs:
                change[piece + 1] += tensor_bytes(t)
                change[self._last(t) + 1] -= tensor_bytes(t)
        return list(accumulate(change[: self.count + 1]))

    def _stages(
        self, ends: Sequence[int], costs: Sequence[float], devices: Sequence[str]
    ) -> tuple[PartitionStage, ...]:
        """Return the stages; each sends all that later ones still read."""
        start, stages = 0, []
        for device, end, cost in zip(devices, ends, costs, strict=True):
            ops = [op for op in self._ops if start <= self._piece[op] < end]
            sent = tuple(
                t
                for op in self._ops
                if self._piece[op] < end
                for t in op.outputs
                if self._last(t) >= end
            )
            total = sum(map(tensor_bytes, sent))
            stages.append(PartitionStage(device, tuple(ops), cost, sent, total))
            start = end
        return tuple(stages)


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A step whose micro-batches pass through stages on several devices.

    Attributes:
        loss: the mean, or the sum, of the losses of the micro-batches.
        gradients: one for each x: a tensor, `tf.IndexedSlices`, or None where the loss
            does not depend on it.
        partition: the stages.
        schedule: the schedule, "1f1b" or "gpipe", with the number of micro-batches.
        recomputed: for each stage, whether its backward passes recompute.
        passes: the ops of the first forward and of the first backward pass of each
            stage, by (stage, whether it is backward).
        notes: the differences from the step of the whole batch, by op, in words.
    """

    loss: Tensor
    gradients: tuple[Any, ...]
    partition: Partition
    schedule: Pipeline = field(repr=False)
    recomputed: tuple[bool, ...]
    passes: Mapping[tuple[int, bool], tuple[Operation, ...]] = field(repr=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The predicted peak of each stage's device in bytes, gradient sums included.

        Variables, constants and feeds are not counted. A device runs one op at a time,
        and receives tensors as early as possible.

        Raises:
            PredictionError: sizes depend on unknown dimensions.
        """
        devices = [stage.device for stage in self.partition.stages]
        ends = [self.loss, self.gradients]
        return device_peaks(ends, devices, lambda op: devices[self._number(op)])

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The bytes of the variables of each stage."""
        stages = self.partition.stages
        return tuple(sum(map(variable_bytes, stage.ops)) for stage in stages)

    @cached_property
    def traffic(self) -> Mapping[tuple[int, int], int]:
        """The bytes sent between stages in a step, by numbers of sender and receiver.

        A tensor that several ops of a device read is sent there once.
        """
        found: Counter[tuple[int, int]] = Counter()
        met: set[tuple[int, int]] = set()
        for op in self._ops:
            here = self._number(op)
            for t in op.inputs:
                there = self._number(t.op)
                if here != there and (id(t), here) not in met:
                    met.add((id(t), here))
                    found[there, here] += tensor_bytes(t)
        return dict(sorted(found.items()))

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline for `geutil.memory.simulate`.

        Times are in multiply-adds by the planner's cost model, as for a device that
        does one per second; set the speed, bandwidth and latency of a machine by
        `dataclasses.replace`. In a simulation a stage sends to the next one only;
        tensors that skip a stage count once on each link between.
        """
        gradients = [0] * len(self.partition.stages)
        for t in tensors_of(self.gradients):
            gradients[self._number(t.op)] += tensor_bytes(t)
        inside = frozenset(self._ops)
        passes = {
            key: [op for op in ops if op in inside] for key, ops in self.passes.items()
        }
        times = {key: float(sum(map(op_time, ops))) for key, ops in passes.items()}
        return replace(
            self.schedule,
            stages=[
                Stage(
                    forward=times[s, False],
                    backward=times[s, True],
                    sent=stage.sent_bytes,
                    kept=self._kept(self.passes[s, False], passes[s, True]),
                    held=self.weights[s] + gradients[s],
                    gradients=gradients[s],
                )
                for s, stage in enumerate(self.partition.stages)
            ],
        )

    @cached_property
    def run(self) -> PipelineRun:
        """The simulation of one step of `pipeline`, in which links take no time."""
        return run_pipeline(self.pipeline)

    @cached_property
    def _ops(self) -> list[Operation]:
        ends = [self.loss, *tensors_of(self.gradients)]
        walked: list[Operation] = get_backward_walk_ops(ends, control_inputs=True)
        return walked

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {stage.device: i for i, stage in enumerate(self.partition.stages)}

    def _number(self, op: Operation) -> int:
        """Return the stage of an op's device, or of the op it is colocated with."""
        met: set[Operation] = set()
        while not op.device and op not in met:
            met.add(op)
            names = colocation_names(op)
            if names:
                op = op.graph.get_operation_by_name(names[0])
        return self._numbers.get(str(op.device), 0)

    def _kept(self, forward: Iterable[Operation], backward: Iterable[Operation]) -> int:
        """Return the bytes that a backward pass reads of the time before it."""
        # Weights and the whole batch are no part of a micro-batch.
        made = {op for key, ops in self.passes.items() if not key[1] for op in ops}
        near = IdentitySet(t for op in forward for t in (*op.inputs, *op.outputs))
        read = IdentitySet(t for op in backward for t in op.inputs)
        return sum(tensor_bytes(t) for t in read if t.op in made and t in near)

    def __str__(self) -> str:
        """Return the balance, bubble, traffic and peaks, a line for each stage."""
        count = self.schedule.micro_batches
        run = self.run
        head = f"{len(self.partition.stages)} stages, {count} micro-batches"
        bubble = f"bubble {run.bubble:.1%} by the cost model if links take no time"
        lines = [f"{head}, {self.schedule.schedule}: {bubble}"]
        busy = sum(run.busy) or 1.0
        for s, stage in enumerate(self.partition.stages):
            sent = sum(size for way, size in self.traffic.items() if way[0] == s)
            again = ", computes again" if self.recomputed[s] else ""
            lines.append(
                f"  {stage.device}: {run.busy[s] / busy:.1%} of the computing{again}; "
                f"weights {size_text(self.weights[s])}; {self._peak(s)}; at most "
                f"{run.in_flight[s]} micro-batches of "
                f"{size_text(self.pipeline.stages[s].kept)} kept; "
                f"sends {size_text(sent)} a step"
            )
        lines += [f"  {note}" for note in self.notes[:_SHOWN]]
        if len(self.notes) > _SHOWN:
            lines.append(f"  and {len(self.notes) - _SHOWN} more notes")
        return "\n".join(lines)

    def _peak(self, stage: int) -> str:
        try:
            return f"predicted peak besides {size_text(self.peaks[stage])}"
        except PredictionError:
            return "peak unknown, since dimensions are open (each counts as 32)"


@dataclass(frozen=True, eq=False)
class Placement:
    """Ops that were moved to a device.

    Attributes:
        device: the device.
        ops: the ops that are there now, in graph order.
        left: the ops that stay where their variable is, in graph order.
        received: the tensors that the ops read from other devices.
        sent: the tensors that are read on other devices.
        received_bytes: the bytes of the former; open dimensions count as 32.
        sent_bytes: the bytes of the latter.
    """

    device: str
    ops: tuple[Operation, ...] = field(repr=False)
    left: tuple[Operation, ...] = field(repr=False)
    received: tuple[Tensor, ...] = field(repr=False)
    sent: tuple[Tensor, ...] = field(repr=False)
    received_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        lines = [f"{len(self.ops)} op(s) on {self.device}"]
        for way, tensors, size in (
            ("receive", self.received, self.received_bytes),
            ("send", self.sent, self.sent_bytes),
        ):
            names = ", ".join(f"'{t.name}'" for t in tensors[:3])
            more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            if tensors:
                lines.append(f"  they {way} {size_text(size)}: {names}{more}")
        lines += [
            f"  '{op.name}' ({op.type}) stays: it reads a variable that is not moved"
            for op in self.left
        ]
        return "\n".join(lines)


@tf.autograph.experimental.do_not_convert
def place(ops: Any, device: str) -> Placement:
    """Assign ops to a device, and return the tensors that cross devices.

    Ops that read a variable from outside stay on its device, since TensorFlow cannot
    run them elsewhere.

    Args:
        ops: ops, or a nested list of them.
        device: the device, such as "/job:worker/task:1" or "/device:CPU:0".

    Returns:
        The ops, and the tensors that cross. Tensors from and to an op without a device
        count as crossing: TensorFlow may place it anywhere.

    Raises:
        ArgumentTypeError: `device` is not a string.
        SelectionError: there are no ops, or ops of several graphs.
        TransformError: an op is colocated with one that is not moved; nothing is
            changed.
        StaleGraphError, FinalizedGraphError: the graph cannot be edited any more.

    Cost: linear in the ops and their edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform import place
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([1000, 250], name="x")
        ...     y = tf.reduce_sum(tf.nn.relu(x, name="relu"), name="sum")
        >>> print(place([y.op.inputs[0].op, y.op], "/device:CPU:0"))
        2 op(s) on /device:CPU:0
          they receive 1.0 MB: 'x:0', 'Const:0'
    """
    if not isinstance(device, str):
        raise ArgumentTypeError(
            "a device is a text, such as '/device:CPU:0', not "
            f"{types.type_name(device)}"
        )
    listed = adjacency.graph_order(selections.make_list_of_op(ops))
    graph = selections.graph_of_all(listed)
    inside = frozenset(listed)
    # TensorFlow runs the readers of a variable only where that is.
    left = dict.fromkeys(
        op
        for op in listed
        if any(is_handle(t.op) and t.op not in inside for t in op.inputs)
    )
    moved = [op for op in listed if op not in left]
    _check_moved_together(moved)
    edits.set_devices(graph, dict.fromkeys(moved, device))
    there = frozenset(moved)
    received = _elsewhere([t for op in moved for t in op.inputs], there, device)
    sent = [
        t
        for op in moved
        for t in op.outputs
        if any(r.device != device for r in adjacency.consumers(t) if r not in there)
    ]
    return Placement(
        device,
        tuple(moved),
        tuple(left),
        tuple(received),
        tuple(sent),
        sum(map(tensor_bytes, received)),
        sum(map(tensor_bytes, sent)),
    )


def _elsewhere(
    tensors: Sequence[Tensor], there: frozenset[Operation], device: str
) -> list[Tensor]:
    """Return the tensors that are not made on a device, each once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.op not in there and tensor.op.device != device:
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _check_moved_together(ops: Sequence[Operation]) -> None:
    """Raise TransformError if an op of a group is moved without another."""
    if not ops:
        return
    inside = {op.name for op in ops}
    for op in ops[0].graph.get_operations():
        for name in colocation_names(op):
            if (op.name in inside) != (name in inside) and name != op.name:
                moved, other = (op.name, name) if op.name in inside else (name, op.name)
                raise TransformError(
                    f"'{moved}' is colocated with '{other}', which is not moved; move "
                    "both"
                )
