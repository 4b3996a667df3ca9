"""What to keep of one call of a checkpointed function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from geutil.gradients.offloading import Offload
from geutil.gradients.preparing import Options, Prepared, keep_all
from geutil.gradients.segments import Recomputation, Segment, plan_recomputation
from geutil.gradients.selection import AlwaysKept, Keeping, resolve
from geutil.gradients.shapes import settle_shapes
from geutil.gradients.sizes import tensor_bytes
from geutil.gradients.step import Step, build_step
from geutil.gradients.wrapped.call import Call, calls_in
from geutil.graph.adjacency import creation_index
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.surroundings import ops_since

INPUTS = "inputs"
"""The mode that holds nothing of a call but what goes into it."""
_LITTLE = 0.1
"""What may come after a call, as a share of it, where it ends the forward pass."""

_NOTHING = (
    "the backward pass reads nothing of it that could be recomputed: these are plain "
    "gradients"
)


def plan_call(
    call: Call,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Sequence[Tensor],
    options: Options,
    offload: Offload | None,
) -> Prepared:
    """Build plain gradients of a call, and plan what is recomputed.

    Args:
        call: the call.
        ys: the outputs of it that a gradient flows into.
        xs: the inputs of it to differentiate by.
        grad_ys: the gradient of each y.
        options: how to choose and hold checkpoints; the mode may be "inputs".
        offload: what is offloaded, and how; the same for all gradients of the call.
    """
    later = ops_since(call.graph, call.end)
    # One x may depend on another around the call: that is not its part.
    step = build_step(ys, xs, grad_ys, {"stop_gradients": list(xs)})
    step = replace(step, first=call.first, gap=_indices(later))
    settle_shapes(step.ops())
    keeping, plan = _choose(call, step, options, later)
    calls = calls_in(call.graph)
    plan = _after(plan, calls.before(step.seeds))
    calls.add(step)
    where = f"the checkpointed call that yields '{call.ys[0].name}': "
    return Prepared(plan, keeping, offload, where)


def _indices(ops: Sequence[Operation]) -> range:
    """Return the creation indices of ops that were made one after the other."""
    if not ops:
        return range(0)
    return range(creation_index(ops[0]), creation_index(ops[-1]) + 1)


def _after(plan: Recomputation, ends: Sequence[Operation]) -> Recomputation:
    """Let what is recomputed at first wait for the calls that come before as well.

    The executor runs weight gradients late, and what they have not read yet is held.
    """
    if not plan.segments or not ends:
        return plan
    # The first segment on other devices waits for the same.
    first = plan.segments[0].awaited
    segments = [
        replace(segment, awaited=(*first, *ends))
        if segment.awaited == first
        else segment
        for segment in plan.segments
    ]
    return replace(plan, segments=tuple(segments))


def _choose(
    call: Call, step: Step, options: Options, later: Iterable[Operation]
) -> tuple[Keeping, Recomputation]:
    inputs = Keeping(INPUTS, IdentitySet(), AlwaysKept(step))
    whole = plan_recomputation(step, inputs, spare_last=False)
    if not whole.segments:
        inputs.warnings.append(_NOTHING)
        return inputs, whole
    if options.checkpoints == INPUTS:
        return inputs, whole
    size = sum(map(_bytes_of, whole.segments))
    ends = not call.alone and _is_little(later, _LITTLE * size)
    # In a graph of its own, a call may be one of any number.
    smallest = options.min_checkpoint_size
    keeping = resolve(step, options.checkpoints, smallest, among_others=call.alone)
    if len(keeping.chosen):
        plan = plan_recomputation(step, keeping, spare_last=ends)
        if options.checkpoints != "memory" or ends or _pays(call, keeping, plan, size):
            return keeping, plan
    elif ends:
        return keeping, plan_recomputation(step, keep_all)
    elif options.checkpoints != "memory":
        inputs.warnings.append(
            f"{keeping.mode} keeps no tensor of it: it holds what goes into it"
        )
    return inputs, whole


def _pays(call: Call, keeping: Keeping, plan: Recomputation, size: int) -> bool:
    """Tell whether to keep more than the inputs of a call saves memory.

    What is chosen is held by each of the calls, and one works at a time.
    """
    held = sum(map(tensor_bytes, keeping.chosen))
    working = max(map(_bytes_of, plan.segments), default=0)
    return calls_in(call.graph).count * held + working < size


def _bytes_of(segment: Segment) -> int:
    return _bytes(segment.ops)


def _is_little(ops: Iterable[Operation], limit: float) -> bool:
    """Tell whether ops make so many bytes at most; passing on makes none."""
    total = 0
    for op in ops:
        if op.type in ("Identity", "IdentityN"):
            continue
        total += _bytes((op,))
        if total > limit:
            return False
    return True


def _bytes(ops: Iterable[Operation]) -> int:
    return sum(tensor_bytes(t) for op in ops for t in op.outputs)
