"""How large tensors are, where some dimensions may be unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable

from geutil.gradients.shapes import UNKNOWN, known_dims
from geutil.graph.kinds import Tensor

_ELSEWHERE = frozenset(("resource", "variant", "string"))


def tensor_bytes(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the size of a tensor in bytes, by the shape it has or is taken to have.

    Handles, variants and strings count nothing: what they refer to is elsewhere. So
    does a tensor of unknown rank.

    Args:
        tensor: the tensor.
        unknown: what an unknown dimension counts as.
    """
    dtype = tensor.dtype
    if dtype.name in _ELSEWHERE:
        return 0
    return tensor_elements(tensor, unknown) * int(dtype.size)


def tensor_elements(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the number of elements of a tensor; 0 for an unknown rank."""
    dims = known_dims(tensor)
    if dims is None:
        return 0
    return math.prod(unknown if d is None else d for d in dims)


def negligible_bytes(sizes: Iterable[int], share: float = 0.01) -> int:
    """Return the size up to which tensors are kept because they do not matter.

    The smallest tensors that make up at most `share` of all bytes: the statistics of a
    batch norm, pooled features, indices. To recompute them would save nothing, and
    would tie segments together.

    Args:
        sizes: the bytes of the tensors that the backward pass reads.
        share: how much of them all the negligible ones may add up to.

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
        if left < 0:
            break
        # Of tensors of one size, all are negligible or none.
        if place + 1 == len(ordered) or ordered[place + 1] > size:
            limit = size
    return limit
