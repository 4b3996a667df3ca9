"""Pipelined steps, and what they take: time, bubble, traffic, and peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from geutil.errors import PredictionError
from geutil.gradients.step import tensors_of
from geutil.graph import colocation
from geutil.graph.types import IdentitySet, Operation, Tensor
from geutil.memory.executor import Pipeline, PipelineRun, Stage, run_pipeline
from geutil.memory.predicting import device_peaks
from geutil.memory.sizes import megabytes, tensor_bytes
from geutil.memory.times import op_time
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.partitioning import Partition
from geutil.transform.stage_memory import variable_bytes

_SHOWN = 4
"""How many notes are printed."""


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A step whose micro-batches go through stages on devices.

    Attributes:
        loss: the mean, or the sum, of the losses of the micro-batches.
        gradients: one for each x: a tensor, `tf.IndexedSlices`, or None where the loss
            does not depend on it.
        partition: the stages.
        schedule: the schedule, "1f1b" or "gpipe", with the number of micro-batches.
        recomputed: for each stage, whether its backward passes compute again.
        passes: the ops of the first forward and of the first backward pass of each
            stage, by stage and whether it is backward.
        notes: what differs from the step of the whole batch, by op, in words.
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
        """The predicted peak of each stage's device in bytes, sums of gradients in it.

        Variables, constants and what is fed come besides. A device runs one op at a
        time, and what it receives is there as early as it can be.

        Raises:
            PredictionError: sizes depend on dimensions that are not known.
        """
        devices = [stage.device for stage in self.partition.stages]
        ends = [self.loss, self.gradients]
        return device_peaks(ends, devices, lambda op: devices[self._number(op)])

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The bytes of the variables of each stage."""
        return tuple(
            sum(map(variable_bytes, stage.ops)) for stage in self.partition.stages
        )

    @cached_property
    def traffic(self) -> Mapping[tuple[int, int], int]:
        """The bytes that go from one stage to another in a step, by their numbers.

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

        Times are in multiply-adds by the planner's cost model, as of a device that does
        one a second; `dataclasses.replace` gives it the speed, bandwidth and latency of
        a machine. In a simulation a stage sends to the next one only; tensors that
        skip a stage count on the links between, once each.
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
        """One step of `pipeline`, simulated; links take no time there."""
        return run_pipeline(self.pipeline)

    @cached_property
    def _ops(self) -> list[Operation]:
        """The ops of the step."""
        ends = [self.loss, *tensors_of(self.gradients)]
        walked: list[Operation] = get_backward_walk_ops(ends, control_inputs=True)
        return walked

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        """The number of the stage on each device."""
        return {stage.device: i for i, stage in enumerate(self.partition.stages)}

    def _number(self, op: Operation) -> int:
        """Return the number of the stage whose device an op is on."""
        return self._numbers.get(_device(op), 0)

    def _kept(self, forward: Iterable[Operation], backward: Iterable[Operation]) -> int:
        """Return the bytes that a backward pass reads of the time before it."""
        # Weights and the whole batch are no part of a micro-batch.
        made = {op for key, ops in self.passes.items() if not key[1] for op in ops}
        near = IdentitySet(t for op in forward for t in (*op.inputs, *op.outputs))
        read = IdentitySet(
            t for op in backward for t in op.inputs if t.op in made and t in near
        )
        return sum(map(tensor_bytes, read))

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
                f"weights {megabytes(self.weights[s])}; {self._peak(s)}; at most "
                f"{run.in_flight[s]} micro-batches of "
                f"{megabytes(self.pipeline.stages[s].kept)} kept; "
                f"sends {megabytes(sent)} a step"
            )
        lines += [f"  {note}" for note in self.notes[:_SHOWN]]
        if len(self.notes) > _SHOWN:
            lines.append(f"  and {len(self.notes) - _SHOWN} more notes")
        return "\n".join(lines)

    def _peak(self, stage: int) -> str:
        try:
            return f"predicted peak besides {megabytes(self.peaks[stage])}"
        except PredictionError:
            return "peak unknown, since dimensions are open (each counts as 32)"


def _device(op: Operation) -> str:
    """Return the device of an op, or of what it is colocated with."""
    met: set[Operation] = set()
    while not op.device and op not in met:
        met.add(op)
        names = colocation.colocation_names(op)
        if not names:
            break
        op = op.graph.get_operation_by_name(names[0])
    return str(op.device)
