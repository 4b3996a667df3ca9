"""Kept tensors that wait in the memory of another device.

TensorFlow moves a tensor to the device of its reader as soon as it is there, whatever
the reader itself waits for: what an edge between two devices becomes, a pair of ops
that send and receive, bears no control edges. So what holds a tensor back is an op on
the device where the tensor waits, and the reader comes behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.gradients.segments import Recomputation, Segment, is_parameter
from geutil.graph import adjacency, creation, types, v1_control_flow
from geutil.graph.types import IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.select.walks import get_backward_walk_ops

SCOPE = "offloaded"
HOST = "/device:CPU:0"
"""Where offloaded tensors wait if nobody says otherwise."""


@dataclass(frozen=True, eq=False)
class Offload:
    """Kept tensors that wait on another device, and how.

    Attributes:
        takes: tells whether a kept tensor goes.
        device: the device that holds it meanwhile.
        prefetch: how many segments ahead of its first use it starts to come back.
        sent: what has gone, each with the tensor there. Where gradients are built twice
            nothing goes twice: TensorFlow builds those of a function again and again
            until they read nothing new.
    """

    takes: Callable[[Tensor], bool]
    device: str
    prefetch: int
    sent: MutableIdentityMap[Tensor] = field(default_factory=MutableIdentityMap)


def offloaded(plan: Recomputation, offload: Offload) -> list[Tensor]:
    """Return the kept tensors that go: those that some segment needs.

    Others are read before the first segment, and would be back at once.
    """
    return [
        t
        for t in IdentitySet(t for s in plan.segments for t in _needed(s))
        if not is_parameter(t.op)
        # What is in a loop or branch of version 1 cannot be read outside.
        and not v1_control_flow.is_inside(t.op)
        and offload.takes(t)
    ]


def _needed(segment: Segment) -> tuple[Tensor, ...]:
    """Return the kept tensors that a segment, or the backward pass in it, reads."""
    return (*segment.originals, *(read.tensor for read in segment.direct))


def bring_back(
    plan: Recomputation, gates: Sequence[Operation], offload: Offload | None
) -> list[types.IdentityMap[Tensor]]:
    """Send tensors away after their last forward use, and back for each segment.

    Returns:
        For each segment, which begins behind its gate, what to read instead of them.
    """
    returned: list[MutableIdentityMap[Tensor]] = [MutableIdentityMap() for _ in gates]
    if offload is None:
        return list(returned)
    step, away = plan.step, offload.sent
    forward = frozenset(
        get_backward_walk_ops(
            list(step.ys), within_ops_fn=step.covers, control_inputs=True
        )
    )
    for t in offloaded(plan, offload):
        if t not in away:
            readers = [op for op in adjacency.consumers(t) if op in forward]
            creation.add_control_edges(send_once(t, offload).op, readers)
    for stage, segment in enumerate(plan.segments):
        begin = stage - offload.prefetch
        awaited = [gates[begin]] if begin >= 0 else list(step.seeds)
        for t in IdentitySet(t for t in _needed(segment) if t in away):
            returned[stage][t] = fetch(t, away[t], awaited, offload.device)
    return list(returned)


def send_once(tensor: Tensor, offload: Offload) -> Tensor:
    """Return a tensor on the other device, where it goes as soon as it is computed."""
    if tensor not in offload.sent:
        name = f"{tensor.op.name}/away"
        offload.sent[tensor] = _identity(tensor, offload.device, name)
    return offload.sent[tensor]


def fetch(
    tensor: Tensor, sent: Tensor, awaited: Sequence[Operation], device: str
) -> Tensor:
    """Return a sent tensor that comes back from a device once some ops have run."""
    graph = tensor.graph
    with creation.neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(device):
        held_back = tf.raw_ops.PlaceholderWithDefault(
            input=sent, shape=tensor.shape, name=f"{tensor.op.name}/wait"
        )
    creation.add_control_edges(held_back.op, awaited)
    return _identity(held_back, tensor.op.device, f"{tensor.op.name}/back")


def _identity(tensor: Tensor, device: str, name: str) -> Tensor:
    graph = tensor.graph
    with creation.neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(device):
        return tf.identity(tensor, name=name)
