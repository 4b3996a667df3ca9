"""The forward pass of a pipelined step: ops of each micro-batch, and shared ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.gradients.step import as_list
from geutil.graph import adjacency, creation, op_types, runtime, types, v1_control_flow
from geutil.graph.types import IdentityMap, IdentitySet, Operation, Tensor
from geutil.pipeline.partitions import Partition
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
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
        IdentitySet(
            t
            for op in ops
            for t in op.inputs
            if t not in wholes and t.op in own and stage_of[t.op] != stage_of[op]
        )
        for ops in stages
    ]
    crossing = IdentitySet(t for tensors in received for t in tensors)
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
