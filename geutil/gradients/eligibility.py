"""Which forward tensors can be recomputed at all, and which are worth it."""

from __future__ import annotations

from collections.abc import Iterable

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.plain_gradients import in_version_1_control_flow, is_stateful

PARAMETERS = frozenset(("Const", "ReadVariableOp", "VariableV2", "Variable"))
"""Types of ops whose outputs are there all the time."""

_GIVEN = PARAMETERS | {
    "Placeholder",
    "PlaceholderWithDefault",
    "VarHandleOp",
    "_Arg",
    "IteratorGetNext",
}
_PRIMITIVE_FLOW = frozenset(
    prefix + name
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "Switch", "NextIteration")
) | {"LoopCond"}


def why_kept(op: Operation) -> str | None:
    """Return why an op cannot be run again, or None if it can.

    What an op does besides computing its outputs must happen once: reading a variable
    that is assigned meanwhile, drawing random numbers, moving an average, printing,
    taking from a queue. So its outputs are kept.
    """
    if op.type in _GIVEN or not op.inputs:
        return "it is given"
    if is_stateful(op):
        return f"a {op.type} must run only once"
    if op.type in _PRIMITIVE_FLOW or in_version_1_control_flow(op):
        return "it belongs to a loop or conditional of version 1"
    return None


def negligible_bytes(sizes: Iterable[int], share: float = 0.01) -> int:
    """Return the size up to which tensors are kept because they do not matter.

    The smallest tensors that make up at most `share` of all bytes: the statistics of a
    batch norm, pooled features, indices. Recomputing them would save nothing, and
    would tie segments together.

    Args:
        sizes: the bytes of the tensors that the backward pass reads.
        share: how much they may add up to.

    Cost: one sort.

    Example:
        >>> negligible_bytes([1, 2, 1000, 1000])
        2
    """
    ordered = sorted(sizes)
    left = share * sum(ordered)
    limit = 0
    for place, size in enumerate(ordered):
        left -= size
        # Of tensors of one size, all are kept or none.
        if place + 1 == len(ordered) or ordered[place + 1] > size:
            if left < 0:
                break
            limit = size
    return limit


def tensor_bytes(tensor: Tensor, unknown: int = 32) -> int:
    """Return the size of a tensor, with a number for each unknown dimension.

    Handles and variants count nothing: what they refer to is elsewhere.
    """
    if tensor.shape.rank is None or not tensor.dtype.size or not _is_data(tensor):
        return 0
    elements = 1
    for dimension in tensor.shape.as_list():
        elements *= unknown if dimension is None else dimension
    return int(elements * tensor.dtype.size)


def _is_data(tensor: Tensor) -> bool:
    return tensor.dtype.name not in ("resource", "variant", "string")
