"""Builds a recomputation: copies forward ops and lets backward ops read the copies."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from geutil.gradients.eligibility import PARAMETERS
from geutil.gradients.offloading import Offload, bring_back
from geutil.gradients.segments import Recomputation, Segment
from geutil.graph.identity import IdentityMap, IdentitySet, MutableIdentityMap
from geutil.graph.importing import add_control_edges, neutral, set_new_input
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.select.views import make_view
from geutil.transform.copying import copy_replacing

SCOPE = "recomputed"


def build_recomputation(
    plan: Recomputation, offload: Offload | None = None
) -> list[list[Operation]]:
    """Change a step with plain gradients into one that recomputes.

    Args:
        plan: what to recompute.
        offload: which kept tensors wait in the memory of another device.

    Returns:
        The copies of the ops of each segment.

    Cost: linear in the recomputed ops and their inputs.
    """
    graph = plan.step.graph
    gates = [_gate(graph, segment.awaited) for segment in plan.segments]
    returned = bring_back(plan, gates, offload)
    return [
        _build_segment(graph, segment, gate, moved)
        for segment, gate, moved in zip(plan.segments, gates, returned, strict=True)
    ]


def _gate(graph: Graph, awaited: Iterable[Operation]) -> Operation:
    """Return the op behind which a segment begins."""
    with neutral(graph), graph.name_scope(f"{SCOPE}/"):
        gate = tf.raw_ops.NoOp(name="gate")
    add_control_edges(gate, list(awaited))
    return gate


def _build_segment(
    graph: Graph, segment: Segment, gate: Operation, moved: IdentityMap[Tensor]
) -> list[Operation]:
    stand_ins = _barriers(graph, segment, gate, moved)
    _, info = copy_replacing(
        make_view(segment.ops), stand_ins, graph, SCOPE, "", reuse_dst_scope=True
    )
    for read in segment.reads:
        set_new_input(read.op, read.index, info.transformed(read.tensor))
    for read in segment.direct:
        if read.tensor in moved:
            set_new_input(read.op, read.index, moved[read.tensor])
    return [info.transformed(op) for op in segment.ops]


def _barriers(
    graph: Graph, segment: Segment, gate: Operation, moved: IdentityMap[Tensor]
) -> IdentityMap[Tensor]:
    """Return a stand-in for each kept tensor that is there when the time has come.

    The order hangs on these nodes, never on kernels: a control edge onto a convolution
    keeps oneDNN's layout pass from merging it, or aborts the process. They are of a
    type that no optimizer of TensorFlow removes.
    """
    stand_ins: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for t in _delayed(segment):
        with neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(t.op.device):
            stand_ins[t] = tf.raw_ops.PlaceholderWithDefault(
                input=moved.get(t, t), shape=t.shape, name="barrier"
            )
        add_control_edges(stand_ins[t].op, [gate])
    return stand_ins


def _delayed(segment: Segment) -> IdentitySet:
    """Return the kept tensors that need a stand-in, so that each op has to wait.

    Variables and constants are read directly where something else delays the op.
    """
    kept = IdentitySet(segment.kept)
    delayed = IdentitySet(t for t in kept if t.op.type not in PARAMETERS)
    for op in segment.ops:
        if all(t in kept and t not in delayed for t in op.inputs):
            delayed.add(op.inputs[0])
    return delayed
