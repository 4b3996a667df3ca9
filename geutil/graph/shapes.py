"""Static shapes, read and compared without building `TensorShape` objects."""

from __future__ import annotations

from geutil.graph.kinds import Tensor

Dims = tuple[int, ...] | None
"""The dimensions of a tensor, -1 where unknown; None for unknown rank."""


def static_dims(tensor: Tensor) -> Dims:
    """Return the static dimensions of `tensor`."""
    dims, unknown_rank = tensor._shape
    return None if unknown_rank else tuple(dims)


def same_static_shape(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have equal static shapes, unknown parts included."""
    return bool(a._shape == b._shape)


def refine_shape(target: Tensor, source: Tensor) -> None:
    """Make the static shape of `target` as definite as that of `source`.

    For a copy whose inputs have the same static shapes as the original's: what the
    original knows beyond shape inference (by `set_shape`) holds for the copy too.
    """
    if target._shape != source._shape:
        target.set_shape(source.shape)
