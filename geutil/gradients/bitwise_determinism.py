"""Gradients of the same bits as plain ones.

Grappler joins an op that has a single reader with that reader: sums of sums
(AddOpsRewrite), products of products (MinimizeBroadcasts), which it computes in an
order of its own, and, for oneDNN, a Pad with the convolution behind it. In plain
gradients the backward pass reads much of the forward pass, which keeps those ops apart.
With recomputation an original and its copy may be left with one reader each. Grappler
joins no op that another one waits for.
"""

# `AddN` adds into the buffer of the first input that nothing else holds any more, and
# begins with that input. Of three or more terms this decides how the sum is rounded. An
# input that another op reads is free if that op happens to have run: so one graph with
# one seed yields two results, even where `enable_op_determinism` was called, and more
# of the second where the machine is busy. Plain gradients have it, too. If the backward
# pass reads inputs of such a sum, it holds them, and the order is fixed. It must not
# change where the backward pass reads copies instead. So such a sum is not run a second
# time, and its inputs are held in another way. Left to chance are sums that Grappler
# joins with their readers, those whose inputs are read by forward ops alone, some of
# which run again, and products of several constants and tensors: Grappler joins the
# constants (ConstantPushDown) in an order that depends on the whole graph.

from __future__ import annotations

from collections.abc import Iterable, Iterator

from geutil.gradients import segments
from geutil.gradients.step import PlainStep, reached, tensors_of
from geutil.graph import op_types
from geutil.graph.creation import add_control_edges, make_stand_in, set_new_input
from geutil.graph.types import IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.memory.kernels import cpu
from geutil.select.walks import get_backward_walk_ops

JOINED = frozenset(("Add", "AddN", "AddV2", "Mul"))

Readers = IdentityMap[list[tuple[Operation, int]]]


def readers_of(step: PlainStep) -> Readers:
    """Return the ops of a step that read the values of each tensor, by input."""
    readers: MutableIdentityMap[list[tuple[Operation, int]]] = MutableIdentityMap()
    for op in get_backward_walk_ops([*step.ys, *tensors_of(step.gradients)]):
        if op.type in op_types.VALUE_BLIND:
            continue
        for index, t in enumerate(op.inputs):
            if t not in readers:
                readers[t] = []
            readers[t].append((op, index))
    return readers


def keep_apart(
    step: PlainStep,
    before: Readers,
    copies: Iterable[tuple[Operation, Operation, Operation]],
) -> None:
    """Keep Grappler from joining ops left with one of several readers `before`."""
    # `copies` are forward ops that run again, each with a copy and an op that runs
    # later.
    # A copy's last reader reads an op in between. Originals get a second reader
    # instead: TensorFlow may be differentiating them just now, and their edges must not
    # change.
    after = readers_of(step)
    for op, copy, later in copies:
        for t, copied in zip(op.outputs, copy.outputs, strict=True):
            if len(before.get(t, ())) < 2:
                continue
            if len(after.get(t, ())) == 1:
                apart = make_stand_in(t, segments.SCOPE, "apart")
                add_control_edges(later, [apart.op])
            readers = after.get(copied, ())
            # oneDNN computes the gradient of a pool that it reads itself.
            if len(readers) == 1 and "PoolGrad" not in readers[0][0].type:
                apart = make_stand_in(copied, segments.SCOPE, "apart")
                set_new_input(*readers[0], apart)


def without_joined(
    step: PlainStep, awaited: Iterable[Operation]
) -> tuple[Operation, ...]:
    """Replace backward ops that Grappler may join by their backward inputs."""
    backward = frozenset(step.backward)

    def joined_with(op: Operation) -> list[Operation]:
        producers = [t.op for t in op.inputs if t.op in backward]
        is_joined = op.type in JOINED and len(op.outputs[0].consumers()) == 1
        return producers if is_joined else []

    return tuple(op for op in reached(awaited, joined_with) if not joined_with(op))


def pin_sum_inputs(
    step: PlainStep, before: Readers, copies: Iterable[tuple[Operation, Operation]]
) -> None:
    """Hold the inputs of sums as long as the backward pass held them `before`."""
    # `copies` are forward ops that run again, with an op that runs after the forward
    # pass.
    backward = frozenset(step.backward)
    added: MutableIdentityMap[Tensor] = MutableIdentityMap()
    summands = {
        (id(t), sum_): (t, later)
        for op, later in copies
        for output in op.outputs
        for t, sum_ in _reads(output, before)
        if segments.is_left_to_chance(sum_) and sum_ not in backward
        # With plain gradients the backward pass holds its input.
        if any(reader in backward for _, reader in _reads(output, before))
    }
    for (_, sum_), (t, later) in summands.items():
        (total,) = sum_.outputs
        # Grappler may join a sum with a single reader, which a second one would stop.
        readers = before.get(total, ())
        if len(readers) == 1 and readers[0][0].type in JOINED:
            continue
        if total not in added:
            added[total] = make_stand_in(total, segments.SCOPE, "added")
        holder = make_stand_in(t, segments.SCOPE, "held").op
        add_control_edges(holder, [added[total].op])
        add_control_edges(later, [holder])


def _reads(tensor: Tensor, before: Readers) -> Iterator[tuple[Tensor, Operation]]:
    """Yield the reads of a tensor, and of forwards of its buffer, with the reader."""
    waiting = [tensor]
    for t in waiting:
        for reader, index in before.get(t, ()):
            yield t, reader
            if cpu.passes_on(reader.type) and index == 0:
                waiting.append(reader.outputs[0])
