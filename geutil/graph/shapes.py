"""Static shapes, read and compared without building `TensorShape` objects."""

from __future__ import annotations

from geutil.graph.kinds import Tensor


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
