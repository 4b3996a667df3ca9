"""The part of the forward pass that can be run again, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from geutil.gradients.edges import backward_edges
from geutil.gradients.segments import Keeps, forward_inputs, ops_behind
from geutil.gradients.sizes import tensor_bytes, tensor_elements
from geutil.gradients.step import Step
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import SUMS
from geutil.memory.predicting.kernels import aliases

NEVER = 1 << 44
"""More than there is; even thousands of these can be added up."""
_FAR = 0.1
"""What reaches over such a part of the forward pass is in the way of all cuts there."""
_MATTERS = 0.01
"""What is a smaller part of all bytes may be kept along, few as its elements are."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Tensors that share one piece of memory.

    Attributes:
        tensors: the tensors, each with the last place that reads it.
        bytes: its size.
        price: what it costs to keep it; `NEVER` where that shall not be. A cast counts
            more than it and its source take, so that the source is kept, which is at
            hand before.
        made: the place of the op that makes it.
        last: the last place that reads it when the forward pass runs again.
        first_read: the first backward op that reads it, by number; after all of them if
            none does.
        last_read: the last backward op that reads it; -1 if none does.
    """

    tensors: list[tuple[Tensor, int, int]]
    bytes: int
    price: int
    made: int
    last: int
    first_read: int
    last_read: int


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward ops that would be run again if nothing were kept by choice.

    Attributes:
        ops: the ops in topological order; the place of an op is its index.
        buffers: what they make, negligible tensors left out.
        end: the number of backward ops.
    """

    ops: Sequence[Operation]
    buffers: Sequence[Buffer]
    end: int


def read_forward(step: Step, always: Keeps, smallest: int = 0) -> ForwardPass:
    """Return what of the forward pass of a step could be run again.

    Args:
        step: the step.
        always: tells which tensors are kept whatever is chosen.
        smallest: no tensor of fewer elements is to be chosen, but one that reaches far:
            the mask of an attention, say, which each layer reads.

    Cost: linear in the ops behind what the backward pass reads, and a sort.
    """
    read = [(t, op) for op, _, t in forward_inputs(step)]
    needed = [(t, op) for t, op in read if not always(t)]
    ops = _ordered(step, ops_behind((t.op for t, _ in needed), always), read)
    place = {op: i for i, op in enumerate(ops)}
    turn = {op: i for i, op in enumerate(step.backward)}
    reads: dict[int, tuple[int, int]] = {}
    for t, reader in needed:
        first, _ = reads.get(id(t), (turn[reader], 0))
        reads[id(t)] = (first, turn[reader])
    last = {id(t): i for i, op in enumerate(ops) for t in op.inputs}
    buffers = []
    groups = _sharing(ops, place, always)
    matters = _MATTERS * sum(tensor_bytes(group[0]) for group in groups)
    for group in groups:
        made = [place[t.op] for t in group]
        ends = [last.get(id(t), place[t.op]) for t in group]
        turns = [reads[id(t)] for t in group if id(t) in reads]
        far = max(ends) - min(made) > _FAR * len(ops)
        least = 0 if far and tensor_bytes(group[0]) < matters else smallest
        buffers.append(
            Buffer(
                tensors=list(zip(group, made, ends, strict=True)),
                bytes=tensor_bytes(group[0]),
                price=max(_price(t, least) for t in group),
                made=min(made),
                last=max(ends),
                first_read=min((first for first, _ in turns), default=len(turn)),
                last_read=max((latest for _, latest in turns), default=-1),
            )
        )
    return ForwardPass(ops, buffers, len(turn))


def _ordered(
    step: Step, ops: Iterable[Operation], read: Sequence[tuple[Tensor, Operation]]
) -> list[Operation]:
    """Put helpers of gradient functions where their inputs are, not at the end.

    One without inputs (zeros, say) goes where the other inputs of its reader are.
    """
    place = backward_edges(step).forward
    near = _places_of_others(step, place, read)
    key: dict[Operation, int] = {}
    for op in ops:
        if not step.is_helper(op):
            key[op] = place[op]
            continue
        known = (t.op for t in op.inputs if t.op in key or not step.is_helper(t.op))
        # What is no part of the step was there before.
        behind = [key[m] if m in key else place.get(m, -1) for m in known]
        key[op] = max(behind) if behind else near.get(op, len(place))
    return sorted(key, key=key.__getitem__)


def _places_of_others(
    step: Step,
    place: Mapping[Operation, int],
    read: Sequence[tuple[Tensor, Operation]],
) -> dict[Operation, int]:
    """Return for each op where its first backward reader's other inputs are made."""
    beside: dict[Operation, int] = {}
    for t, reader in read:
        if not step.is_helper(t.op):
            beside[reader] = max(beside.get(reader, 0), place.get(t.op, 0))
    near: dict[Operation, int] = {}
    for t, reader in read:
        near.setdefault(t.op, beside.get(reader, len(place)))
    return near


def _sharing(
    ops: Sequence[Operation], place: dict[Operation, int], always: Keeps
) -> list[list[Tensor]]:
    """Return the tensors that are not always kept, in groups of one buffer each."""
    groups: dict[int, list[Tensor]] = {}
    for op in ops:
        source = {out: op.inputs[place] for out, place in aliases(op)}
        for index, t in enumerate(op.outputs):
            if always(t):
                continue
            group = groups.get(id(source.get(index)))
            if group is None:
                group = []
            group.append(t)
            groups[id(t)] = group
    return list({id(group): group for group in groups.values()}.values())


def _is_passed_over(tensor: Tensor) -> bool:
    """Tell whether a tensor only goes from one sum into the next.

    Grappler adds up in one op what a chain of sums adds, in an order of its own, unless
    somebody else reads a sum in between. To keep that one would change how the forward
    pass rounds; and the next sum is no larger.
    """
    readers = tensor.consumers()
    return tensor.op.type in SUMS and len(readers) == 1 and readers[0].type in SUMS


def _price(tensor: Tensor, smallest: int) -> int:
    if tensor_elements(tensor) < smallest or _is_passed_over(tensor):
        return NEVER
    size = tensor_bytes(tensor)
    if tensor.op.type == "Cast":
        return max(size, tensor_bytes(tensor.op.inputs[0])) + 1
    return size
