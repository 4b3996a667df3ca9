"""Builds a recomputation: copies the forward ops, and lets the backward ops read them."""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.identity import IdentityMap, IdentitySet
from geutil.graph.importing import add_control_edges, neutral, set_new_input
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.gradients.eligibility import PARAMETERS
from geutil.gradients.segments import Recomputation, Segment
from geutil.select.views import make_view
from geutil.transform.copying import copy_replacing
from geutil.transform.result import TransformerInfo

SCOPE = "recomputed"


def build_recomputation(plan: Recomputation) -> list[list[Operation]]:
    """Change a step with plain gradients into one that recomputes.

    Args:
        plan: what to recompute.

    Returns:
        The copies of the ops of each segment.

    Cost: linear in the recomputed ops and their inputs.
    """
    return [_build_segment(plan.step.graph, segment) for segment in plan.segments]


def _build_segment(graph: Graph, segment: Segment) -> list[Operation]:
    stand_ins = _barrier(graph, segment)
    _, info = copy_replacing(
        make_view(segment.ops), stand_ins, graph, SCOPE, "", reuse_dst_scope=True
    )
    for read in segment.reads:
        set_new_input(read.op, read.index, info.transformed(read.tensor))
    return [info.transformed(op) for op in segment.ops]


def _barrier(graph: Graph, segment: Segment) -> IdentityMap[Tensor]:
    """Return a stand-in for each kept tensor that is there when the time has come.

    The order hangs on these nodes, never on kernels: a control edge onto a convolution
    keeps oneDNN's layout pass from merging it, or aborts the process. They are of a
    type that no optimizer of TensorFlow removes.
    """
    with neutral(graph), graph.name_scope(f"{SCOPE}/"):
        gate = tf.raw_ops.NoOp(name="gate")
        add_control_edges(gate, segment.awaited)
        stand_ins = []
        for t in _delayed(segment):
            with graph.device(t.op.device):
                stand_in = tf.raw_ops.PlaceholderWithDefault(
                    input=t, shape=t.shape, name="barrier"
                )
            add_control_edges(stand_in.op, [gate])
            stand_ins.append((t, stand_in))
    return IdentityMap(stand_ins)


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
