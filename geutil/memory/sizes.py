"""Bytes of tensors, as numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.graph.types import Tensor, dereference


def megabytes(size: int) -> str:
    """Return a size in MB of 10^6 bytes, small ones with more places.

    Example:
        >>> megabytes(1_234_567_890), megabytes(4_194_304), megabytes(1200)
        ('1235 MB', '4.2 MB', '0.0012 MB')
    """
    amount = size / 1e6
    if size == 0 or abs(amount) >= 100:
        return f"{amount:.0f} MB"
    return f"{amount:.1f} MB" if abs(amount) >= 1 else f"{amount:.2g} MB"


GivenShapes: TypeAlias = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""Shapes of tensors: by tensor, reference or name."""

STRING_BYTES = 24
"""What TensorFlow keeps for one string, besides the characters of a long one."""


def dtype_bytes(dtype: tf.DType) -> int:
    """Return the bytes of one element. Handles and variants count nothing.

    What a handle or variant leads to (a variable, a list of tensors) is no part of it.
    """
    base = dtype.base_dtype
    if base in (tf.resource, tf.variant):
        return 0
    return STRING_BYTES if base == tf.string else int(base.size)


def dims_of(tensor: Tensor) -> tuple[int | None, ...] | None:
    """Return the static shape of a tensor, or None where the rank is not known."""
    shape = tensor.shape
    return None if shape.rank is None else tuple(shape.as_list())


def bytes_of_shape(dtype: tf.DType, dims: Sequence[int | None] | None) -> int | None:
    """Return the bytes of a tensor of a dtype and shape, or None where it is open."""
    each = dtype_bytes(dtype)
    if not each:
        return 0
    if dims is None:
        return None
    known = [dim for dim in dims if dim is not None]
    return each * math.prod(known) if len(known) == len(dims) else None


def bytes_of(tensor: Tensor, shapes: GivenShapes | None = None) -> int | None:
    """Return the bytes of a tensor's elements, without building anything.

    Args:
        tensor: a symbolic tensor.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs. A key is a tensor, its `ref()` or its name; the name of an op
            stands for its first output.

    Returns:
        The bytes, or None where a dimension is not known. A handle or variant counts
        0 bytes, a string 24.

    Cost: linear in `shapes`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import bytes_of
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 10], name="x")
        >>> print(bytes_of(x), bytes_of(x, {"x": [8, 10]}))
        None 320
    """
    dims = dims_of(tensor)
    for key, shape in pairs_of(shapes):
        key = dereference(key)
        if key is tensor or (isinstance(key, str) and tensor_name(key) == tensor.name):
            dims = tuple(tf.TensorShape(shape).as_list())
    return bytes_of_shape(tensor.dtype, dims)


def pairs_of(shapes: GivenShapes | None) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of shapes that are given as a mapping or as pairs."""
    return shapes.items() if isinstance(shapes, Mapping) else shapes or ()


def tensor_name(name: str) -> str:
    """Return the name of a tensor; that of an op stands for its first output."""
    return name if ":" in name else f"{name}:0"
