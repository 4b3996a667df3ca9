"""Training steps of micro-batches that pass through the stages of a partition."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from geutil.errors import PredictionError
from geutil.gradients.segments import SCOPE as RECOMPUTED
from geutil.gradients.step import as_list, source_of, tensors_of
from geutil.gradients.tape.entries import aggregate
from geutil.graph import creation, runtime, state, types
from geutil.graph.runtime import colocation_names
from geutil.graph.types import (
    Graph,
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
)
from geutil.memory.by_device import device_peaks
from geutil.memory.costs import op_time, tensor_bytes
from geutil.memory.executor import Pipeline, PipelineRun, Schedule, Stage, run_pipeline
from geutil.pipeline.forward_pass import SourcePass, other_seed, read_source
from geutil.pipeline.partitions import Partition
from geutil.pipeline.stage_memory import variable_bytes
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.sizes import size_text
from geutil.transform import transformer
from geutil.transform.transformer import Transformer

# How many notes are printed.
_SHOWN = 4


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


@tf.autograph.experimental.do_not_convert
def pipelined(
    loss: Tensor,
    xs: Any,
    partition: Partition,
    inputs: Any,
    micro_batches: int,
    *,
    schedule: Schedule = "1f1b",
    recompute: bool = True,
    mean: bool = True,
) -> PipelinedStep:
    """Build the gradients of a batch whose micro-batches pass through pipeline stages.

    The batch is split along its first axis. For each micro-batch the forward pass is
    copied; variables, and ops that read no data, are shared. For each micro-batch, a
    stage keeps the tensors that it reads from other stages, and recomputes the rest in
    its backward pass. Control dependencies enforce the order of passes of stage s (from
    0), so that under any executor it keeps at most min(M, stages - s) of M
    micro-batches with "1f1b", and M with "gpipe". With "1f1b", the last stage runs each
    backward pass right after the forward pass, and recomputes nothing. Gradients are
    accumulated as they arrive.

    The gradients are those of the whole batch if the loss is a mean over the examples
    of the batch, or with `mean=False` a sum. That is not checked. Statistics of a batch
    norm in training are those of each micro-batch. Random ops draw new numbers for each
    micro-batch, and these are kept. An op that changes state is refused if it depends
    on the data, and runs once if not. `notes` of the result lists which of these apply.

    Args:
        loss: a scalar, computed by a partitioned forward pass; in a graph of version 1
            or inside `tf.function`.
        xs: a tensor, variable or Keras variable, or a list of them.
        partition: the stages (`geutil.transform.partition`). It is applied to the
            graph.
        inputs: the tensors to split. Either tensors of the forward pass that hold the
            whole batch, or pairs (or a mapping, keyed by tensor or `ref()`): a tensor
            of a forward pass built for one micro-batch, and the tensor of the whole
            batch that it is a part of. All other inputs are shared.
        micro_batches: the number of parts, which divides the size of each batch.
        schedule: "1f1b" or "gpipe", as in `geutil.memory.Pipeline`.
        recompute: whether a stage recomputes its forward tensors in the backward pass,
            or keeps them.
        mean: whether the loss and its gradients are means over micro-batches, or sums.

    Returns:
        The loss and the gradients; `str` of it has the balance, the traffic, the bubble
        and the predicted peak of each stage.

    Raises:
        ArgumentTypeError: an input or the loss is not a tensor of a graph.
        TransformError: the loss is not a number, a batch is not divisible, an op cannot
            be copied for each micro-batch, or the graph is built for one size of batch.
        PlanError: an unknown schedule, or no micro-batch.

    Cost: that of `tf.gradients` and of two copies of the forward pass, for each
        micro-batch.

    Source: Huang et al., "GPipe", 2018, arXiv 1811.06965; Narayanan et al.,
        "PipeDream", 2019 (1F1B).

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import pipelined
        >>> from geutil.transform import partition
        >>> with tf.Graph().as_default():
        ...     x = y = tf.compat.v1.placeholder(tf.float32, [8, 10], name="x")
        ...     w = tf.compat.v1.get_variable("w", [10, 10], use_resource=True)
        ...     for _ in range(4):
        ...         y = tf.tanh(y @ w)
        ...     loss = tf.reduce_mean(y)
        ...     found = partition(loss, ["/device:CPU:0", "/device:CPU:1"], "time")
        ...     step = pipelined(loss, [w], found, [x], micro_batches=4)
        >>> step.loss.shape.rank, step.gradients[0].shape.as_list()
        (0, [10, 10])
    """
    idle = [Stage(1.0, 1.0)] * len(partition.stages)
    pipeline = Pipeline(idle, micro_batches, schedule)
    sources = [source_of(x) for x in as_list(xs)]
    source = read_source(loss, sources, partition, inputs, micro_batches)
    partition.apply()
    builder = _StepBuilder(source, sources, pipeline, recompute=recompute, mean=mean)
    with loss.graph.as_default():
        builder.build()
        total, gradients = builder.results()
    made = (builder.recomputed, builder.passes, source.notes)
    return PipelinedStep(total, tuple(gradients), partition, pipeline, *made)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass of a micro-batch through a stage, while it is built."""

    stage: int
    batch: int
    graph: Graph
    device: str
    scope: str
    # The end of the pass of the stage before this one, if there was one.
    awaited: tuple[Operation, ...]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make ops on the device of the stage, in the scope."""
        graph, device = self.graph, self.device
        scope = graph.name_scope(f"{self.scope}/")
        with creation.neutral(graph), scope, graph.device(device):
            yield

    def wait(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the pass reads it: when the pass before has ended."""
        with self.inside():
            # No optimizer removes this type, and no kernel has the control edge.
            waiting = tf.raw_ops.PlaceholderWithDefault(
                input=tensor, shape=tensor.shape, name="read"
            )
        creation.add_control_edges(waiting.op, self.awaited)
        return waiting

    def part(self, whole: Tensor, count: int) -> Tensor:
        """Return the part of a batch that is the micro-batch, one of so many."""
        waiting = self.wait(whole)
        with self.inside():
            dims = whole.shape.as_list()[1:]
            if any(d is None for d in dims):
                dims = tf.unstack(tf.shape(waiting)[1:], len(dims))
            # Fails in a run if the micro-batches do not divide the batch.
            parts = tf.reshape(waiting, tf.stack([count, -1, *dims]), name="split")
            part = parts[self.batch]
            size = whole.shape[0]
            part.set_shape([size and size // count, *whole.shape[1:]])
        return part


class _StepBuilder:
    """Builds the passes of a step, one after another as they can run."""

    def __init__(
        self,
        source: SourcePass,
        xs: Sequence[Any],
        pipeline: Pipeline,
        *,
        recompute: bool,
        mean: bool,
    ) -> None:
        self._source, self._xs, self._pipeline = source, xs, pipeline
        self._graph = source.loss.graph
        count, stages = pipeline.micro_batches, len(source.stages)
        self._weight = 1 / count if mean else 1.0
        self._scope = types.absolute_unique_name(self._graph, "pipeline")
        # With each backward pass behind its forward pass there is nothing to save.
        is_last_at_once = pipeline.passes(stages - 1)[:2] == [(False, 0), (True, 0)]
        # Of each stage, whether its backward passes compute again.
        others = (recompute,) * (stages - 1)
        self.recomputed = (*others, recompute and not is_last_at_once)
        # The first forward and backward pass of each stage, see `PipelinedStep`.
        self.passes: dict[tuple[int, bool], tuple[Operation, ...]] = {}
        # The copies of ops that each micro-batch has in its forward passes.
        self._copied: list[dict[Operation, Operation]] = [{} for _ in range(count)]
        # Of stages that do not compute again: the tensors to differentiate by.
        self._read: dict[tuple[int, int], IdentityMap[Tensor]] = {}
        self._incoming: list[MutableIdentityMap[list[Tensor]]] = [
            MutableIdentityMap() for _ in range(count)
        ]
        self._sums: list[dict[int, list[Any]]] = [{} for _ in range(stages)]
        self._gates: list[tuple[Operation, ...]] = [()] * stages
        self._loss: Tensor | None = None

    def build(self) -> None:
        """Build all passes."""
        stages = range(len(self._source.stages))
        waiting = [deque(self._pipeline.passes(s)) for s in stages]
        done: set[tuple[int, int, bool]] = set()
        while any(waiting):
            for s in stages:
                if not waiting[s]:
                    continue
                is_backward, batch = waiting[s][0]
                before = s + 1 if is_backward else s - 1
                # A pass reads tensors of the one before it in its direction.
                if before not in stages or (before, batch, is_backward) in done:
                    waiting[s].popleft()
                    self._build_pass(s, batch, is_backward)
                    done.add((s, batch, is_backward))

    def _build_pass(self, stage: int, batch: int, is_backward: bool) -> None:
        count = state.count_ops(self._graph)
        build = self._backward if is_backward else self._forward
        kind = "backward" if is_backward else "forward"
        now = self._pass(stage, batch, f"/stage_{stage}/{kind}_{batch}")
        ends = [*build(now), *now.awaited]
        with now.inside():
            end = tf.raw_ops.NoOp(name="end")
        creation.add_control_edges(end, list(dict.fromkeys(ends)))
        self._gates[stage] = (end,)
        # The passes of one micro-batch stand for those of all.
        if not batch:
            ops = state.ops_since(self._graph, count)
            self.passes[stage, is_backward] = tuple(ops)

    def _pass(self, stage: int, batch: int = 0, scope: str = "") -> _Pass:
        device, scope = self._source.devices[stage], f"{self._scope}{scope}"
        return _Pass(stage, batch, self._graph, device, scope, self._gates[stage])

    def _inputs(self, now: _Pass) -> IdentityMap[Tensor]:
        """Return the tensors of other stages as a pass reads them, by the original."""
        received = self._source.received[now.stage]
        return IdentityMap((t, now.wait(self._copy_of(now, t))) for t in received)

    def _copy_of(self, now: _Pass, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor that the forward passes have made."""
        copy: Operation = self._copied[now.batch][tensor.op]
        return copy.outputs[tensor.value_index]

    def _copy(
        self, now: _Pass, read: IdentityMap[Tensor], ops: Sequence[Operation]
    ) -> dict[Operation, Operation]:
        """Copy ops of a stage that read other tensors."""
        wholes, copied = self._source.wholes, self._copied[now.batch]
        count = self._pipeline.micro_batches
        replaced = MutableIdentityMap(read.items())
        for t in (t for op in ops for t in op.inputs if t in wholes):
            if t not in replaced:
                replaced[t] = now.part(wholes[t], count)
        if not ops:
            return {}
        inside = frozenset(ops)
        copier = Transformer()
        reseed = partial(other_seed, micro_batch=now.batch)
        copy_op = partial(transformer.copy_op_handler, nodedef_fn=reseed)
        copier.transform_op_handler = copy_op
        copier.transform_external_input_handler = transformer.keep_t_if_possible_handler
        copier.assign_collections_handler = lambda info, element, copy: None

        def control(info: Any, op: Operation) -> Operation:
            return info.transformed_ops.get(op) or copied.get(op, op)

        copier.transform_control_input_handler = control
        copier.replacements = IdentityMap(replaced.items())
        with creation.neutral(self._graph):
            _, info = copier(make_view(ops), self._graph, now.scope, "", True)
        copies = {op: info.transformed(op) for op in ops}
        for op, copy in copies.items():
            # Ops that draw numbers may read nothing that waits.
            if not any(t in replaced or t.op in inside for t in op.inputs):
                creation.add_control_edges(copy, now.awaited)
        return copies

    def _forward(self, now: _Pass) -> list[Operation]:
        """Build a forward pass; return the ops that end it."""
        source, stage = self._source, now.stage
        read = self._read[stage, now.batch] = self._inputs(now)
        copies = self._copy(now, read, source.stages[stage])
        self._copied[now.batch].update(copies)
        ends = [copies[t.op] for t in source.sent[stage]]
        if stage == source.loss_stage:
            loss = self._copy_of(now, source.loss)
            with now.inside():
                first = self._loss is None
                self._loss = loss if first else tf.add(self._loss, loss, name="losses")
            ends.append(self._loss.op)
        return ends

    def _backward(self, now: _Pass) -> list[Operation]:
        """Build a backward pass; return the ops that end it."""
        source, incoming = self._source, self._incoming[now.batch]
        read = self._read.pop((now.stage, now.batch))
        copy_of: Callable[[Tensor], Tensor] = partial(self._copy_of, now)
        if self.recomputed[now.stage]:
            again = replace(now, scope=f"{now.scope}/{RECOMPUTED}")
            read, copy_of = self._again(again)
        targets, seeds = self._seeds(now, copy_of)
        # No gradient comes back to this stage, and the loss is in another one.
        if not targets:
            return []
        by = [t for t in source.received[now.stage] if runtime.is_differentiable(t)]
        received = [read[t] for t in by]
        places = source.used[now.stage]
        xs = [*received, *(self._xs[i] for i in places)]
        # The stages before differentiate their own part: the walk has to end here.
        options = {"stop_gradients": received} if received else {}
        with now.inside(), self._graph.device(None):
            gradients = runtime.plain_gradients(
                self._graph, targets, xs, seeds, options
            )
        ends: list[Operation] = []
        with now.inside():
            for t, gradient in zip(by, gradients, strict=False):
                if gradient is not None:
                    # Another stage waits for it and adds it to others, as one tensor.
                    dense = tf.convert_to_tensor(gradient)
                    incoming[t] = [*incoming.get(t, ()), dense]
                    ends.append(dense.op)
            for i, gradient in zip(places, gradients[len(by) :], strict=True):
                if gradient is not None:
                    ends += self._add(now.stage, i, gradient)
        return ends

    def _again(
        self, now: _Pass
    ) -> tuple[IdentityMap[Tensor], Callable[[Tensor], Tensor]]:
        """Copy a stage once more; return its inputs, and a finder of its copies."""
        once, ops = self._source.once, self._source.stages[now.stage]
        read = self._inputs(now)
        run_once = (t for op in ops if op in once for t in op.outputs)
        kept = IdentityMap((t, now.wait(self._copy_of(now, t))) for t in run_once)
        replaced = IdentityMap((*read.items(), *kept.items()))
        copies = self._copy(now, replaced, [op for op in ops if op not in once])

        def copy_of(t: Tensor) -> Tensor:
            return kept[t] if t in kept else copies[t.op].outputs[t.value_index]

        return read, copy_of

    def _seeds(
        self, now: _Pass, copy_of: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the differentiated tensors of a stage, and the gradient of each."""
        source, targets, seeds = self._source, [], []
        for t in source.sent[now.stage]:
            waiting = list(map(now.wait, self._incoming[now.batch].get(t, ())))
            if waiting:
                with now.inside():
                    seeds.append(tf.add_n(waiting) if waiting[1:] else waiting[0])
                targets.append(copy_of(t))
        if now.stage == source.loss_stage:
            # With `mean`, the loss is the mean of those of the micro-batches.
            with now.inside():
                one = tf.constant(self._weight, source.loss.dtype, name="weight")
            seeds.append(now.wait(one))
            targets.append(copy_of(source.loss))
        return targets, seeds

    def _add(self, stage: int, place: int, gradient: Any) -> list[Operation]:
        """Add a gradient to those of earlier micro-batches; return the end ops."""
        parts = self._sums[stage].setdefault(place, [])
        if all(isinstance(part, tf.IndexedSlices) for part in (*parts, gradient)):
            parts.append(gradient)
        else:
            # One sum at a time, into the buffer of the one before.
            total, *others = map(tf.convert_to_tensor, (*parts, gradient))
            for part in others:
                total = tf.add(total, part, name="sum")
            parts[:] = [total]
        return [t.op for t in tensors_of(parts[-1:])]

    def results(self) -> tuple[Tensor, list[Any]]:
        """Return the loss and the gradient by each x, when the step has ended there."""
        with self._pass(self._source.loss_stage).inside():
            total = tf.multiply(self._loss, self._weight, name="loss")
        return total, [self._result(place) for place in range(len(self._xs))]

    def _result(self, place: int) -> Any:
        """Return the gradient by an x, of all stages that use it."""
        ends = [self._pass(s) for s, sums in enumerate(self._sums) if place in sums]
        parts = []
        for end in ends:
            for part in self._sums[end.stage][place]:
                if isinstance(part, tf.IndexedSlices):
                    values, indices = end.wait(part.values), end.wait(part.indices)
                    parts.append(tf.IndexedSlices(values, indices, part.dense_shape))
                else:
                    parts.append(end.wait(part))
        # As in `tf.gradients`: an x that no stage uses has no gradient.
        if not parts:
            return None
        with ends[0].inside():
            return aggregate(parts)
