"""Bytes of tensors, as numbers and in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.graph import types
from geutil.graph.state import state_of
from geutil.graph.types import GivenShapes, Tensor

Dims: TypeAlias = tuple[int | None, ...]

UNKNOWN = 32
"""The size assumed for an unknown dimension: most are a batch."""


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


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(amount: Any) -> int | None:
    """Return a number of bytes, or a text such as "1.5GB", as bytes; None if neither.

    Example:
        >>> byte_count("1.5GB"), byte_count("2 MiB"), byte_count(64), byte_count("much")
        (1500000000, 2097152, 64, None)
    """
    if isinstance(amount, bool):
        return None
    if isinstance(amount, int | float):
        return int(amount) if 0 < amount < math.inf else None
    read = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(amount))
    unit = _UNITS.get(read[2].upper()) if read else None
    if not isinstance(amount, str) or read is None or unit is None:
        return None
    return int(float(read[1]) * unit) or None


STRING_BYTES = 24
"""The bytes of one string in TensorFlow, besides the characters of a long one."""


def dtype_bytes(dtype: tf.DType) -> int:
    """Return the bytes of one element. Handles and variants count nothing.

    The variable or list that a handle or variant leads to is no part of it.
    """
    base = dtype.base_dtype
    if base in (tf.resource, tf.variant):
        return 0
    return STRING_BYTES if base == tf.string else int(base.size)


def bytes_of_shape(dtype: tf.DType, dims: Sequence[int | None] | None) -> int | None:
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
    dims = types.dims_of(tensor)
    for key, shape in types.pairs_of(shapes):
        key = types.dereference(key)
        if key is tensor or (
            isinstance(key, str) and types.tensor_name(key) == tensor.name
        ):
            dims = tuple(tf.TensorShape(shape).as_list())
    return bytes_of_shape(tensor.dtype, dims)


def known_dims(tensor: Tensor) -> Dims | None:
    """Return the shape of a tensor as known, given or assumed; None without a rank."""
    dims = types.dims_of(tensor)
    if dims is not None and None not in dims:
        return dims
    shapes = state_of(tensor.graph).open_shapes
    if shapes is None:
        return dims
    known: Dims | None = shapes.known.get(tensor, dims)
    return known


def tensor_elements(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the number of elements of a tensor; 0 for an unknown rank."""
    dims = known_dims(tensor)
    if dims is None:
        return 0
    return math.prod(unknown if d is None else d for d in dims)


_SIZED_ELSEWHERE = frozenset(("resource", "variant", "string"))


def tensor_bytes(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the size of a tensor in bytes, by the shape it has or is taken to have.

    Handles, variants and strings count nothing: what they refer to is elsewhere. So
    does a tensor of unknown rank. An unknown dimension counts as `unknown`.
    """
    dtype = tensor.dtype
    if dtype.name in _SIZED_ELSEWHERE:
        return 0
    return tensor_elements(tensor, unknown) * int(dtype.size)
