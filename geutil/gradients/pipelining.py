"""Training steps of micro-batches that go through the stages of a partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.gradients.pipeline_report import PipelinedStep
from geutil.gradients.pipeline_source import Source, other_seed, read_source
from geutil.gradients.segments import SCOPE as RECOMPUTED
from geutil.gradients.step import as_list, source_of, tensors_of
from geutil.gradients.tape.engine import aggregate
from geutil.graph import creation, runtime, state, types
from geutil.graph.types import Operation, Tensor
from geutil.memory.pipeline import Pipeline, Schedule, Stage
from geutil.select.queries import make_view
from geutil.transform import handlers
from geutil.transform.partitioning import Partition
from geutil.transform.transformer import Transformer

_SCOPE = "pipeline"
_Tensors = types.MutableIdentityMap[Tensor]


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
    """Build the gradients of a batch whose micro-batches go through stages on devices.

    The batch is split along its first axis. For each micro-batch the forward pass is
    copied; variables, and what reads no data, are shared. A stage keeps of a
    micro-batch what it reads of other stages, and computes the rest again in its
    backward pass. Control edges hold each stage to its order of passes, so that under
    any executor it keeps at most min(M, stages - s) of M micro-batches with "1f1b", s
    counted from 0, and M with "gpipe". The last stage of "1f1b" has each backward pass
    right behind the forward pass, and computes nothing again. Gradients are added up as
    they come.

    The gradients are those of the whole batch if the loss is a mean over the examples
    of the batch, or with `mean=False` a sum. That is not checked. Statistics of a batch
    norm in training are those of each micro-batch. Random ops draw anew for each
    micro-batch, and what they drew is kept, not drawn again. What changes state and
    depends on the data is refused; what changes state and does not depend on them runs
    once. `notes` of the result says which of these the graph has.

    Args:
        loss: a number, made by a partitioned forward pass; in a graph of version 1 or
            inside `tf.function`.
        xs: a tensor, variable or Keras variable, or a list of them.
        partition: the stages (`geutil.transform.partition`). It is applied.
        inputs: the tensors to split. Either tensors of the forward pass that hold the
            whole batch, or pairs (or a mapping, keyed by tensor or `ref()`): a tensor
            of a forward pass built for one micro-batch, and the tensor of the whole
            batch that it has parts of. All other inputs are shared.
        micro_batches: how many parts. They divide each batch.
        schedule: "1f1b" or "gpipe", as in `geutil.memory.Pipeline`.
        recompute: whether a stage computes again what it needs to go backward, or keeps
            it.
        mean: whether the loss and its gradients are means over micro-batches, or sums.

    Returns:
        The loss and the gradients; printed, it says the balance, the traffic, the
        bubble and the predicted peak of each stage.

    Raises:
        ArgumentTypeError: an input or the loss is no tensor of a graph.
        TransformError: the loss is no number, a batch is not divisible, an op cannot be
            copied for each micro-batch, or the graph is built for one size of batch.
        PlanError: no such schedule, or no micro-batch.

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
    builder = _Builder(source, sources, pipeline, recompute=recompute, mean=mean)
    with loss.graph.as_default():
        builder.build()
        total, gradients = builder.results()
    return PipelinedStep(
        total,
        tuple(gradients),
        partition,
        pipeline,
        builder.recomputed,
        builder.passes,
        source.notes,
    )


class _Builder:
    """Builds the passes of a step, one after another in an order in which they can run.

    Attributes:
        recomputed: for each stage, whether its backward passes compute again.
        passes: the ops of the first forward and of the first backward pass of each
            stage, by stage and whether it is backward.
    """

    def __init__(
        self,
        source: Source,
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
        self._scope = types.absolute_unique_name(self._graph, _SCOPE)
        # With each backward pass behind its forward pass there is nothing to save.
        is_last_at_once = pipeline.passes(stages - 1)[:2] == [(False, 0), (True, 0)]
        self.recomputed = tuple(
            recompute and not (s == stages - 1 and is_last_at_once)
            for s in range(stages)
        )
        self.passes: dict[tuple[int, bool], tuple[Operation, ...]] = {}
        self._copies: list[_Tensors] = [_Tensors() for _ in range(count)]
        self._copied_ops: list[dict[Operation, Operation]] = [{} for _ in range(count)]
        # Of stages that do not compute again: what to differentiate by.
        self._read: dict[tuple[int, int], _Tensors] = {}
        self._incoming: list[types.MutableIdentityMap[tuple[Tensor, ...]]] = [
            types.MutableIdentityMap() for _ in range(count)
        ]
        self._sums: list[dict[int, list[Any]]] = [{} for _ in range(stages)]
        # The end of the last pass of each stage, if there was one.
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
                if before not in stages or (before, batch, is_backward) in done:
                    waiting[s].popleft()
                    self._build_pass(s, batch, is_backward)
                    done.add((s, batch, is_backward))

    def _build_pass(self, stage: int, batch: int, is_backward: bool) -> None:
        before = state.count_ops(self._graph)
        build = self._backward if is_backward else self._forward
        kind = "backward" if is_backward else "forward"
        scope = f"{self._scope}/stage_{stage}/{kind}_{batch}"
        ends = [*build(stage, batch, scope), *self._gates[stage]]
        with self._at(stage, scope):
            end = tf.raw_ops.NoOp(name="end")
        creation.add_control_edges(end, list(dict.fromkeys(ends)))
        self._gates[stage] = (end,)
        if not batch:
            ops = state.ops_since(self._graph, before)
            self.passes[stage, is_backward] = tuple(ops)

    @contextmanager
    def _at(self, stage: int, scope: str) -> Iterator[None]:
        """Make ops on the device of a stage, in a scope."""
        graph, device = self._graph, self._source.devices[stage]
        with (
            creation.neutral(graph),
            graph.name_scope(f"{scope}/"),
            graph.device(device),
        ):
            yield

    def _wait(self, stage: int, scope: str, tensor: Tensor) -> Tensor:
        """Return a tensor as a pass reads it: when the pass before has ended."""
        with self._at(stage, scope):
            # No optimizer removes this type, and no kernel has the control edge.
            waiting = tf.raw_ops.PlaceholderWithDefault(
                input=tensor, shape=tensor.shape, name="read"
            )
        creation.add_control_edges(waiting.op, self._gates[stage])
        return waiting

    def _part(self, stage: int, batch: int, scope: str, whole: Tensor) -> Tensor:
        """Return the part of a batch that is a micro-batch."""
        count = self._pipeline.micro_batches
        waiting = self._wait(stage, scope, whole)
        with self._at(stage, scope):
            dims = whole.shape.as_list()[1:]
            if any(d is None for d in dims):
                dims = tf.unstack(tf.shape(waiting)[1:], len(dims))
            # Fails in a run if the micro-batches do not divide the batch.
            parts = tf.reshape(waiting, tf.stack([count, -1, *dims]), name="split")
            part = parts[batch]
            size = whole.shape[0]
            part.set_shape([size and size // count, *whole.shape[1:]])
        return part

    def _inputs(self, stage: int, batch: int, scope: str) -> _Tensors:
        """Return the tensors of other stages as a pass reads them, by the original."""
        copies = self._copies[batch]
        received = self._source.received[stage]
        return _Tensors((t, self._wait(stage, scope, copies[t])) for t in received)

    def _copy(
        self,
        stage: int,
        batch: int,
        scope: str,
        read: _Tensors,
        ops: Sequence[Operation],
    ) -> tuple[_Tensors, dict[Operation, Operation]]:
        """Copy ops of a stage that read other tensors."""
        source, copied = self._source, self._copied_ops[batch]
        replaced = _Tensors(read.items())
        for op in ops:
            for t in op.inputs:
                if t in source.wholes and t not in replaced:
                    replaced[t] = self._part(stage, batch, scope, source.wholes[t])
        if not ops:
            return _Tensors(), {}
        inside = frozenset(ops)
        copier = Transformer()
        copier.transform_op_handler = partial(
            handlers.copy_op_handler,
            nodedef_fn=partial(other_seed, micro_batch=batch),
        )
        copier.transform_external_input_handler = handlers.keep_t_if_possible_handler
        copier.assign_collections_handler = lambda info, element, copy: None

        def control(info: Any, op: Operation) -> Operation:
            return info.transformed_ops.get(op) or copied.get(op, op)

        copier.transform_control_input_handler = control
        copier.replacements = types.IdentityMap(replaced.items())
        with creation.neutral(self._graph):
            _, info = copier(make_view(ops), self._graph, scope, "", True)
        for op in ops:
            # What draws numbers may read nothing that waits.
            if not any(t in replaced or t.op in inside for t in op.inputs):
                creation.add_control_edges(info.transformed(op), self._gates[stage])
        tensors = _Tensors((t, info.transformed(t)) for op in ops for t in op.outputs)
        return tensors, {op: info.transformed(op) for op in ops}

    def _forward(self, stage: int, batch: int, scope: str) -> list[Operation]:
        """Build a forward pass; return the ops that end it."""
        source = self._source
        read = self._inputs(stage, batch, scope)
        tensors, ops = self._copy(stage, batch, scope, read, source.stages[stage])
        self._copies[batch].update(tensors.items())
        self._copied_ops[batch].update(ops)
        self._read[stage, batch] = read
        ends = [tensors[t].op for t in source.sent[stage]]
        if source.loss in tensors:
            loss = tensors[source.loss]
            with self._at(stage, scope):
                first = self._loss is None
                self._loss = loss if first else tf.add(self._loss, loss, name="losses")
            ends.append(self._loss.op)
        return ends

    def _backward(self, stage: int, batch: int, scope: str) -> list[Operation]:
        """Build a backward pass; return the ops that end it."""
        source = self._source
        tensors, read = self._copies[batch], self._read.pop((stage, batch))
        if self.recomputed[stage]:
            tensors, read = self._again(stage, batch, f"{scope}/{RECOMPUTED}")
        targets, seeds = self._seeds(stage, batch, scope, tensors)
        if not targets:
            return []
        by = [t for t in source.received[stage] if runtime.is_differentiable(t)]
        received = [read[t] for t in by]
        places = source.used[stage]
        with self._at(stage, scope), self._graph.device(None):
            gradients = runtime.plain_gradients(
                self._graph,
                targets,
                [*received, *(self._xs[i] for i in places)],
                seeds,
                {"stop_gradients": received} if received else {},
            )
        ends: list[Operation] = []
        with self._at(stage, scope):
            for t, gradient in zip(by, gradients, strict=False):
                if gradient is not None:
                    dense = tf.convert_to_tensor(gradient)
                    earlier = self._incoming[batch].get(t, ())
                    self._incoming[batch][t] = (*earlier, dense)
                    ends.append(dense.op)
            for i, gradient in zip(places, gradients[len(by) :], strict=True):
                if gradient is not None:
                    ends += self._add(stage, i, gradient)
        return ends

    def _again(self, stage: int, batch: int, scope: str) -> tuple[_Tensors, _Tensors]:
        """Copy a stage once more, for its backward pass."""
        source = self._source
        read = self._inputs(stage, batch, scope)
        ops = [op for op in source.stages[stage] if op not in source.once]
        replaced = _Tensors(read.items())
        kept = _Tensors()
        for op in source.stages[stage]:
            for t in op.outputs if op in source.once else ():
                replaced[t] = kept[t] = self._wait(stage, scope, self._copies[batch][t])
        tensors, _ = self._copy(stage, batch, scope, replaced, ops)
        tensors.update(kept.items())
        return tensors, read

    def _seeds(
        self, stage: int, batch: int, scope: str, tensors: _Tensors
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what of a stage is differentiated, and the gradient of each."""
        source, targets, seeds = self._source, [], []
        for t in source.sent[stage]:
            parts = self._incoming[batch].get(t, ())
            if parts:
                waiting = [self._wait(stage, scope, part) for part in parts]
                with self._at(stage, scope):
                    seeds.append(tf.add_n(waiting) if waiting[1:] else waiting[0])
                targets.append(tensors[t])
        if stage == source.loss_stage:
            with self._at(stage, scope):
                one = tf.constant(self._weight, source.loss.dtype, name="weight")
            seeds.append(self._wait(stage, scope, one))
            targets.append(tensors[source.loss])
        return targets, seeds

    def _add(self, stage: int, place: int, gradient: Any) -> list[Operation]:
        """Add a gradient to those of earlier micro-batches; return what to wait for."""
        parts = self._sums[stage].setdefault(place, [])
        if isinstance(gradient, tf.IndexedSlices) and all(
            isinstance(part, tf.IndexedSlices) for part in parts
        ):
            parts.append(gradient)
        else:
            dense = [tf.convert_to_tensor(g) for g in (*parts, gradient)]
            # One sum at a time, into the buffer of the one before.
            total = dense[0]
            for part in dense[1:]:
                total = tf.add(total, part, name="sum")
            parts[:] = [total]
        return [t.op for t in tensors_of(parts[-1:])]

    def results(self) -> tuple[Tensor, list[Any]]:
        """Return the loss and the gradient by each x, when the step has ended there."""
        stage = self._source.loss_stage
        with self._at(stage, self._scope):
            total = tf.multiply(self._loss, self._weight, name="loss")
        return total, [self._result(place) for place in range(len(self._xs))]

    def _result(self, place: int) -> Any:
        """Return the gradient by an x, of all stages that use it."""
        stages = [s for s, sums in enumerate(self._sums) if place in sums]
        parts = []
        for s in stages:
            wait = partial(self._wait, s, self._scope)
            for part in self._sums[s][place]:
                if isinstance(part, tf.IndexedSlices):
                    values, indices = wait(part.values), wait(part.indices)
                    parts.append(tf.IndexedSlices(values, indices, part.dense_shape))
                else:
                    parts.append(wait(part))
        if not parts:
            return None
        with self._at(stages[0], self._scope):
            return aggregate(parts)
