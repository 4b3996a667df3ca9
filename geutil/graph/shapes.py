"""Static shapes, read and compared without building `TensorShape` objects."""

from __future__ import annotations

from collections.abc import Iterable

from geutil.graph.types import Operation, Tensor


def same_static_shape(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have equal static shapes, unknown parts included."""
    return bool(a._shape == b._shape)


def refine_shapes(ops: Iterable[tuple[Operation, Operation]]) -> None:
    """Make the static shapes of copies as definite as those of their originals.

    For copies whose inputs have the same static shapes as the originals': what the
    original knows beyond shape inference (by `set_shape`) holds for the copy too.

    Args:
        ops: pairs (original, copy).
    """
    for op, op_ in ops:
        for t, t_ in zip(op.outputs, op_.outputs, strict=True):
            if t._shape != t_._shape:
                # What set_shape does, without a TensorShape in between.
                t_._shape_val = None
                t_._set_shape(*t._shape)
