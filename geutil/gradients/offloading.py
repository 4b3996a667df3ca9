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

from geutil.gradients.segments import Recomputation, is_parameter
from geutil.graph import adjacency, creation, types, v1_control_flow
from geutil.graph.types import IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.select.walks import get_backward_walk_ops

SCOPE = "offloaded"
HOST = "/device:CPU:0"
"""Where offloaded tensors wait if nobody says otherwise."""


@dataclass(frozen=True, eq=False)
class Offload:
    """What is offloaded, and how.

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

    What the backward pass reads before the first segment would be back at once.
    """
    needed = IdentitySet(
        t
        for segment in plan.segments
        for t in (*segment.originals, *(read.tensor for read in segment.direct))
    )
    return [
        t
        for t in needed
        if not is_parameter(t.op)
        # What is in a loop or branch of version 1 cannot be read outside.
        and not v1_control_flow.is_inside(t.op)
        and offload.takes(t)
    ]


def bring_back(
    plan: Recomputation, gates: Sequence[Operation], offload: Offload | None
) -> list[types.IdentityMap[Tensor]]:
    """Send tensors away after their last forward use, and back for each segment.

    Args:
        plan: what is recomputed.
        gates: the op behind which each segment begins.
        offload: what goes where, or None.

    Returns:
        For each segment, what to read instead of the tensors that went.

    Cost: linear in the readers of the tensors that go.
    """
    returned: list[MutableIdentityMap[Tensor]] = [MutableIdentityMap() for _ in gates]
    if offload is None:
        return list(returned)
    forward = frozenset(
        get_backward_walk_ops(
            list(plan.step.ys), within_ops_fn=plan.step.covers, control_inputs=True
        )
    )
    away = offload.sent
    for t in offloaded(plan, offload):
        if t not in away:
            away[t] = _send(t, offload.device, forward)
    for stage, segment in enumerate(plan.segments):
        needed = (*segment.originals, *(read.tensor for read in segment.direct))
        for t in IdentitySet(t for t in needed if t in away):
            begin = stage - offload.prefetch
            awaited = [gates[begin]] if begin >= 0 else list(plan.step.seeds)
            back = fetch(t, away[t], awaited, offload.device)
            returned[stage][t] = back
    return list(returned)


def send_once(tensor: Tensor, offload: Offload) -> Tensor:
    """Return a tensor on the other device, where it goes as soon as it is computed."""
    if tensor not in offload.sent:
        name = f"{tensor.op.name}/away"
        offload.sent[tensor] = _identity(tensor, offload.device, name)
    return offload.sent[tensor]


def _send(tensor: Tensor, device: str, forward: frozenset[Operation]) -> Tensor:
    readers = [op for op in adjacency.consumers(tensor) if op in forward]
    sent = _identity(tensor, device, f"{tensor.op.name}/away")
    creation.add_control_edges(sent.op, readers)
    return sent


def fetch(
    tensor: Tensor, sent: Tensor, awaited: Sequence[Operation], device: str
) -> Tensor:
    """Return a tensor that comes back from another device once something has run.

    Args:
        tensor: what was sent.
        sent: the tensor on the other device.
        awaited: what comes first.
        device: the other device.
    """
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
