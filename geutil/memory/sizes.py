"""Bytes of tensors, as numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from geutil.graph import types
from geutil.graph.state import state_of
from geutil.graph.types import GivenShapes, Tensor
from geutil.graph.walks import tensor_name

Dims: TypeAlias = tuple[int | None, ...]

UNKNOWN = 32
"""The size assumed for an unknown dimension: most are a batch."""


STRING_BYTES = 24
"""The bytes of one string in TensorFlow, besides the characters of a long one."""


def dtype_bytes(dtype: Any) -> int:
    """Return the bytes of one element; handles and variants lead elsewhere."""
    base = dtype.base_dtype
    if base.name in ("resource", "variant"):
        return 0
    return STRING_BYTES if base.name == "string" else int(base.size)


def bytes_of_shape(dtype: Any, dims: Sequence[int | None] | None) -> int | None:
    """Return the bytes of a tensor of a dtype and shape, or None where it is open."""
    each = dtype_bytes(dtype)
    if not each:
        return 0
    if dims is None:
        return None
    static_dims = [dim for dim in dims if dim is not None]
    return each * math.prod(static_dims) if len(static_dims) == len(dims) else None


def bytes_of(tensor: Tensor, shapes: GivenShapes | None = None) -> int | None:
    """Return the bytes of a tensor's elements, without building anything.

    Args:
        tensor: a symbolic tensor.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs. A key is a tensor, its `ref()` or its name; the name of an op
            means its first output.

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
    dims = types.dims_of(tensor)
    for key, shape in types.pairs_of(shapes):
        key = types.dereference(key)
        if key is tensor or (isinstance(key, str) and tensor_name(key) == tensor.name):
            dims = tuple(type(tensor.shape)(shape).as_list())
    return bytes_of_shape(tensor.dtype, dims)


def known_dims(tensor: Tensor) -> Dims | None:
    """Return the shape of a tensor as known, given or assumed; None without a rank."""
    dims = types.dims_of(tensor)
    is_open = dims is None or None in dims
    shapes = state_of(tensor.graph).open_shapes if is_open else None
    known: Dims | None = dims if shapes is None else shapes.known.get(tensor, dims)
    return known


def tensor_elements(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the number of elements of a tensor; 0 for an unknown rank."""
    dims = known_dims(tensor)
    return 0 if dims is None else math.prod(unknown if d is None else d for d in dims)


def tensor_bytes(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the size of a tensor in bytes, by its known or assumed shape."""
    # Handles, variants and strings count nothing: their contents are elsewhere. So does
    # a tensor of unknown rank.
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    return tensor_elements(tensor, unknown) * int(tensor.dtype.size)
