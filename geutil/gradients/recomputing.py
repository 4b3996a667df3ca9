"""Builds a recomputation: copies forward ops and lets backward ops read the copies."""

from __future__ import annotations

from geutil.gradients.delays import SCOPE, ControlDelays, DataDelays, Delays
from geutil.gradients.offloading import Offload
from geutil.gradients.segments import Recomputation
from geutil.graph.importing import set_new_input
from geutil.graph.kinds import Operation
from geutil.graph.xla import is_compiled_by_xla
from geutil.select.views import make_view
from geutil.transform.copying import copy_replacing


def build_recomputation(
    plan: Recomputation, offload: Offload | None = None
) -> list[list[Operation]]:
    """Change a step with plain gradients into one that recomputes.

    Args:
        plan: what to recompute.
        offload: which kept tensors wait in the memory of another device. Under XLA
            there is only one device, and nothing is offloaded.

    Returns:
        The copies of the ops of each segment.

    Cost: linear in the recomputed ops and their inputs.
    """
    delays: Delays
    if is_compiled_by_xla(plan.step.graph):
        delays = DataDelays(plan)
    else:
        delays = ControlDelays(plan, offload)
    return [_build(plan, stage, delays) for stage in range(len(plan.segments))]


def _build(plan: Recomputation, stage: int, delays: Delays) -> list[Operation]:
    segment = plan.segments[stage]
    _, info = copy_replacing(
        make_view(segment.ops),
        delays.copies(stage),
        plan.step.graph,
        SCOPE,
        "",
        reuse_dst_scope=True,
    )
    for read in segment.reads:
        set_new_input(read.op, read.index, info.transformed(read.tensor))
    stand_ins = delays.direct(stage)
    for read in segment.direct:
        if read.tensor in stand_ins:
            set_new_input(read.op, read.index, stand_ins[read.tensor])
    return [info.transformed(op) for op in segment.ops]
