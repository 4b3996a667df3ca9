"""Builds a recomputation: copies forward ops and lets backward ops read the copies."""

from __future__ import annotations

from dataclasses import replace

from geutil.gradients import barriers, bitwise_determinism, edges
from geutil.gradients.barriers import SCOPE, ControlDelays, DataDelays, Delays
from geutil.gradients.offloading import Offload
from geutil.gradients.segments import Recomputation
from geutil.gradients.step import PlainStep
from geutil.graph import adjacency, creation, runtime
from geutil.graph.types import IdentityMap, Operation, Tensor
from geutil.select.queries import make_view
from geutil.transform.state import TransformerInfo
from geutil.transform.transformer import copy_replacing


def build_recomputation(
    plan: Recomputation, offload: Offload | None = None
) -> PlainStep:
    """Change a step with plain gradients into one that recomputes.

    Args:
        plan: what to recompute.
        offload: which kept tensors wait in the memory of another device. Under XLA
            there is only one device, and nothing is offloaded.

    Returns:
        The step with the gradients to return.

    Cost: linear in the ops of the step and their edges.
    """
    if not plan.segments:
        return plan.step
    if runtime.is_compiled_by_xla(plan.step.graph):
        # XLA fuses sums, and has an order of its own.
        _recompute(plan, DataDelays(plan))
        return _run_pools_in_time(plan.step)
    if runtime.is_determinism_enabled():
        # Sums and turns would change what Grappler joins, and so how it rounds.
        readers = bitwise_determinism.readers_of(plan.step)
        delays = ControlDelays(_parted(plan), offload)
        copies = _recompute(plan, delays)
        delayed = [
            (op, gate)
            for segment, gate in zip(plan.segments, delays.gates, strict=True)
            for op in segment.ops
        ]
        bitwise_determinism.pin_sum_inputs(plan.step, readers, delayed)
        bitwise_determinism.keep_apart(
            plan.step,
            readers,
            ((op, copies.transformed(op), gate) for op, gate in delayed),
        )
        return plan.step
    _recompute(plan, ControlDelays(plan, offload))
    return edges.add_in_turn(plan.step)


def _run_pools_in_time(step: PlainStep) -> PlainStep:
    """Let XLA expand the gradients of pools no earlier than they are run."""
    replaced = {}
    for op in filter(barriers.is_expanded, step.backward):
        output = op.outputs[0]
        reads = [
            (r, i)
            for r in adjacency.consumers(output)
            for i in adjacency.input_indices(r, output)
        ]
        with creation.neutral(step.graph), step.graph.name_scope(f"{SCOPE}/"):
            replaced[op] = barriers.run_in_time(op)
        for reader, index in reads:
            creation.set_new_input(reader, index, replaced[op])
    return edges.with_replaced(step, replaced)


def _parted(plan: Recomputation) -> Recomputation:
    """Return the plan with segments that wait for nothing that Grappler may join."""
    segments = (
        replace(
            segment,
            awaited=bitwise_determinism.without_joined(plan.step, segment.awaited),
        )
        for segment in plan.segments
    )
    return replace(plan, segments=tuple(segments))


def _recompute(plan: Recomputation, delays: Delays) -> TransformerInfo:
    """Copy forward ops, and let the backward pass read the copies."""
    stages = range(len(plan.segments))
    # Made first, so that the copies come after what they read.
    stand_ins = [delays.copies(stage) for stage in stages]
    info = _copy(plan)
    for segment, instead in zip(plan.segments, stand_ins, strict=True):
        for op in segment.ops:
            _reread(info.transformed(op), op, instead)
    for stage, segment in enumerate(plan.segments):
        for read in segment.reads:
            creation.set_new_input(read.op, read.index, info.transformed(read.tensor))
        instead = delays.direct(stage)
        for read in segment.direct:
            if read.tensor in instead:
                creation.set_new_input(read.op, read.index, instead[read.tensor])
    return info


def _copy(plan: Recomputation) -> TransformerInfo:
    """Copy the ops of all segments at once, reading kept tensors where they do.

    One import costs as much as looking through the graph, however little is imported.
    Their control inputs are left out: these have run by then, or, where ops are of a
    backward pass themselves, lie in segments that come later.
    """
    ops = [op for segment in plan.segments for op in segment.ops]
    replacements = IdentityMap(
        (t, t) for segment in plan.segments for t in segment.kept
    )
    _, info = copy_replacing(
        make_view(ops),
        replacements,
        plan.step.graph,
        SCOPE,
        "",
        reuse_dst_scope=True,
        keep_control_inputs=False,
    )
    return info


def _reread(copy: Operation, original: Operation, instead: IdentityMap[Tensor]) -> None:
    for index, t in enumerate(original.inputs):
        if t in instead:
            creation.set_new_input(copy, index, instead[t])
