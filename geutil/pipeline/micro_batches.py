"""Training steps of micro-batches that pass through the stages of a partition.

The forward pass is read first: the ops that each micro-batch has for itself, and those
that all share. Then the passes of all micro-batches are built from copies of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.gradients.step import RECOMPUTED, as_list, source_of, tensors_of
from geutil.gradients.tape.entries import aggregate
from geutil.graph import (
    adjacency,
    creation,
    op_types,
    runtime,
    state,
    types,
    v1_control_flow,
)
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.memory.executor import Pipeline, Schedule, Stage
from geutil.pipeline.partitions import Partition, PipelinedStep
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform import transformer
from geutil.transform.transformer import Transformer

_BROADCAST = (
    op_types.ADDITIONS
    | op_types.SCALINGS
    | op_types.SELECTS
    | {"Sub", "SquaredDifference", "Maximum", "Minimum", "Pow", "Equal", "NotEqual"}
    | {"Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr"}
)
_REMEDY = (
    "build the graph for one micro-batch, and pass as inputs pairs of its tensors and "
    "those of the whole batch"
)
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_SEED = "seed2"


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
class SourcePass:
    """A forward pass, read for copies of it."""

    loss: Tensor
    devices: tuple[str, ...]
    # Of each stage the ops that each micro-batch has for itself, topologically sorted.
    stages: tuple[tuple[Operation, ...], ...]
    # The tensor of the whole batch for each that is split.
    wholes: IdentityMap[Tensor]
    # The ops that a stage must not run again in its backward pass.
    once: frozenset[Operation]
    # Of each stage the tensors that it reads of earlier ones, and later ones of it.
    received: tuple[tuple[Tensor, ...], ...]
    sent: tuple[tuple[Tensor, ...], ...]
    # Of each stage the places of the xs that it reads, directly or not.
    used: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]

    @property
    def loss_stage(self) -> int:
        """The stage that makes the loss."""
        return next(i for i, ops in enumerate(self.stages) if self.loss.op in ops)


def read_source(
    loss: Tensor,
    xs: Sequence[Any],
    partition: Partition,
    inputs: Any,
    micro_batches: int,
) -> SourcePass:
    """Read a forward pass; refuse ops that cannot be copied for each micro-batch."""
    types.require_tensor(loss)
    if loss.shape.rank != 0:
        raise TransformError(
            f"'{loss.name}' has the shape {loss.shape}, and a loss is one number; pass "
            "tf.reduce_mean of it"
        )
    wholes = _wholes(inputs, micro_batches)
    stage_of = {op: i for i, stage in enumerate(partition.stages) for op in stage.ops}
    behind = get_backward_walk_ops([loss], control_inputs=True)
    if stray := next((op for op in behind if op not in stage_of), None):
        raise TransformError(
            f"'{stray.name}' is behind the loss and in no stage; pass the partition "
            f"of '{loss.name}'"
        )
    # An op is split if one that it depends on is: that has to come first.
    own = _of_each(adjacency.topological_sort(behind), wholes)
    if loss.op not in own:
        raise TransformError(
            f"'{loss.name}' depends on none of {[t.name for t in wholes]}; pass as "
            "inputs the tensors that hold the batch"
        )
    stages: list[list[Operation]] = [[] for _ in partition.stages]
    for op in own:
        if why := _why_not_copied(op):
            raise TransformError(
                f"'{op.name}' ({op.type}) depends on the micro-batch and {why}"
            )
        stages[stage_of[op]].append(op)
    # The rehearsal copies the pass: checks that name the op at fault come before.
    _rehearse(behind, own, wholes, micro_batches)
    received = [
        types.IdentitySet(
            t
            for op in ops
            for t in op.inputs
            if t not in wholes and t.op in own and stage_of[t.op] != stage_of[op]
        )
        for ops in stages
    ]
    crossing = types.IdentitySet(t for tensors in received for t in tensors)
    sent = [[t for op in ops for t in op.outputs if t in crossing] for ops in stages]
    sources = [_op_of(x, loss.graph) for x in xs]
    _check_sources(sources, own, wholes)
    return SourcePass(
        loss,
        tuple(stage.device for stage in partition.stages),
        tuple(map(tuple, stages)),
        wholes,
        frozenset(op for op in own if types.is_stateful(op) and op.type not in _READS),
        tuple(map(tuple, received)),
        tuple(map(tuple, sent)),
        tuple(_used(ops, own, sources) for ops in stages),
        tuple(_notes(own)),
    )


def _wholes(inputs: Any, micro_batches: int) -> IdentityMap[Tensor]:
    """Return the tensor of the whole batch by tensor that is split, checked."""
    if isinstance(inputs, Mapping):
        inputs = list(inputs.items())
    pairs = []
    for item in as_list(inputs):
        is_pair = isinstance(item, tuple) and len(item) == 2
        # A tensor alone is that of the whole batch, of which each copy reads a part.
        part, whole = item if is_pair else (item, item)
        part = types.dereference(part)
        for tensor in (part, whole):
            if not types.is_tensor(tensor):
                raise ArgumentTypeError(
                    "inputs are tensors of the graph, or pairs of a tensor and that of "
                    f"the whole batch, got {types.type_name(tensor)}"
                )
        _check_batch(part, whole, micro_batches)
        pairs.append((part, whole))
    return IdentityMap(pairs)


def _check_batch(part: Tensor, whole: Tensor, micro_batches: int) -> None:
    """Raise `TransformError` unless a tensor is one micro-batch of another."""
    if whole.shape.rank is None or part.shape.rank is None:
        raise TransformError(
            f"the rank of '{whole.name}' is not known, so it cannot be split; set its "
            "shape with set_shape"
        )
    if not whole.shape.rank:
        raise TransformError(
            f"'{whole.name}' is one number and has no batch to split; leave it out of "
            "inputs, and all micro-batches read it"
        )
    batch = whole.shape[0]
    # The size of an open batch is known only when the step runs.
    if batch is not None and batch % micro_batches:
        raise TransformError(
            f"'{whole.name}' has a batch of {batch}, which {micro_batches} "
            "micro-batches do not divide; choose a number that divides it"
        )
    fits = part.shape.is_compatible_with(_micro_batch(whole, micro_batches))
    if part is not whole and not (fits and part.dtype == whole.dtype):
        raise TransformError(
            f"'{part.name}' ({part.dtype.name} {part.shape}) is no part of "
            f"'{whole.name}' ({whole.dtype.name} {whole.shape}) in {micro_batches} "
            "micro-batches"
        )


def _micro_batch(whole: Tensor, micro_batches: int) -> list[int | None]:
    """Return the shape of a micro-batch, given the tensor of the whole batch."""
    batch, *rest = whole.shape
    return [batch and batch // micro_batches, *rest]


def _of_each(
    ops: Sequence[Operation], wholes: IdentityMap[Tensor]
) -> dict[Operation, None]:
    """Return the ops that each micro-batch has for itself: data and random numbers."""
    found: dict[Operation, None] = {}
    for op in ops:
        # An op that only makes a split tensor is run for the whole batch.
        if op.outputs and all(t in wholes for t in op.outputs):
            continue
        before = (*(t.op for t in op.inputs), *adjacency.control_inputs(op))
        split = any(t in wholes for t in op.inputs)
        if split or _draws(op) or any(b in found for b in before):
            found[op] = None
    return found


def _draws(op: Operation) -> bool:
    """Return whether an op draws random numbers from a state of its own."""
    return types.is_stateful(op) and _SEED in op.node_def.attr


def other_seed(node_def: Any, micro_batch: int) -> Any:
    """Give an op that draws numbers other ones for each micro-batch."""
    attributes = node_def.attr
    if _SEED in attributes and (attributes["seed"].i or attributes[_SEED].i):
        attributes[_SEED].i += 1_000_003 * micro_batch
    return node_def


def _why_not_copied(op: Operation) -> str | None:
    """Return why an op cannot be run for each micro-batch, or None."""
    if v1_control_flow.is_inside(op) or op.type in op_types.MERGES | op_types.SWITCHES:
        return (
            "is in a loop or conditional of version 1, which is not split into stages; "
            "build it with tf.compat.v1.enable_control_flow_v2()"
        )
    # An Identity of a reference reads the variable, and changes nothing.
    if any(types.is_reference(t) for t in op.inputs) and op.type != "Identity":
        return (
            "reads or changes a variable of version 1, so it would do so for each "
            "micro-batch; build the graph with use_resource=True, and changes outside "
            "of the forward pass"
        )
    # These are stateful, and yet may run again for each micro-batch.
    known = _draws(op) or op.type in _READS or op.type == "Assert"
    if types.is_stateful(op) and not known:
        return (
            "may change state, which would happen once for each micro-batch; take it "
            "out of the forward pass, or open the model with geutil.model.open, which "
            "inlines calls"
        )
    return None


def _rehearse(
    behind: Sequence[Operation],
    copied: Iterable[Operation],
    wholes: IdentityMap[Tensor],
    micro_batches: int,
) -> None:
    """Refuse a forward pass whose copy in another graph takes no micro-batch."""
    # If every part is a tensor of its own, the graph is that of a micro-batch already.
    if not any(part is whole for part, whole in wholes.items()):
        return
    graph = creation.new_graph()
    copier = Transformer()
    pairs = []
    with graph.as_default():
        for part, whole in wholes.items():
            shape = _micro_batch(whole, micro_batches)
            pairs.append((part, tf.compat.v1.placeholder(part.dtype, shape)))
    copier.replacements = IdentityMap(pairs)
    copier.assign_collections_handler = lambda info, element, copy: None
    inside = [op for op in behind if not any(t in wholes for t in op.outputs)]
    try:
        _, info = copier(make_view(inside), graph, "", "")
    except TransformError as error:
        raise TransformError(
            f"the forward pass does not take a micro-batch; {_REMEDY}: {error}"
        ) from error
    for op in copied:
        _check_size(op, info.transformed(op), micro_batches)


def _check_size(op: Operation, copy: Operation, micro_batches: int) -> None:
    """Refuse a copy that mixes the whole batch with a micro-batch, and yet runs."""
    if op.type != "Reshape" and op.type not in _BROADCAST:
        return
    out, out_ = (_first_dim(o.outputs[0]) for o in (op, copy))
    for t, t_ in zip(op.inputs, copy.inputs, strict=True):
        first, first_ = _first_dim(t), _first_dim(t_)
        if first is None or first_ is None or first == first_:
            continue
        if out == out_ == first == micro_batches * first_:
            raise TransformError(
                f"'{op.name}' ({op.type}) makes a first axis of {out} of a micro-batch "
                f"of {first_}, too; write -1 for the batch in a reshape, pass all "
                f"tensors of the batch as inputs, or {_REMEDY}"
            )


def _first_dim(tensor: Tensor) -> int | None:
    return tensor.shape[0] if tensor.shape.rank else None


def _check_sources(
    sources: Iterable[Operation | None],
    own: Mapping[Operation, None],
    wholes: IdentityMap[Tensor],
) -> None:
    """Refuse xs that gradients do not reach: data, and sources of the data."""
    before = frozenset(get_backward_walk_ops(list(wholes.values())))
    before |= frozenset(t.op for t in wholes)
    for op in sources:
        if op is not None and (op in own or op in before):
            raise TransformError(
                f"'{op.name}' is, or leads to, a tensor that is split into "
                "micro-batches, and gradients are given for what all of them share; "
                "leave it out of xs"
            )


def _op_of(x: Any, graph: Any) -> Operation | None:
    """Return the op of an x in a graph: that of a tensor, or of a variable's handle."""
    is_variable = isinstance(x, tf.Variable)
    tensor = runtime.variable_tensor(graph, x) if is_variable else x
    return tensor.op if types.is_tensor(tensor) else None


def _used(
    ops: Sequence[Operation],
    own: Mapping[Operation, None],
    sources: Iterable[Operation | None],
) -> tuple[int, ...]:
    """Return the places of the xs that some ops read, directly or not."""
    shared = [t for op in ops for t in op.inputs if t.op not in own]
    walked = frozenset(
        get_backward_walk_ops(shared, within_ops_fn=lambda op: op not in own)
    )
    return tuple(i for i, op in enumerate(sources) if op in walked)


def _notes(copied: Iterable[Operation]) -> list[str]:
    """Return the intended differences from the whole batch, in words."""
    notes = []
    for op in copied:
        attributes = op.node_def.attr
        if op.type in op_types.FUSED_NORMS and attributes["is_training"].b:
            notes.append(f"'{op.name}': its statistics are of each micro-batch")
        elif op.type.startswith("StatelessRandom"):
            notes.append(f"'{op.name}': draws the same numbers for each micro-batch")
        elif _draws(op):
            notes.append(f"'{op.name}': draws anew for each micro-batch")
    return notes


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass of a micro-batch through a stage, while it is built."""

    stage: int
    batch: int
    graph: types.Graph
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
