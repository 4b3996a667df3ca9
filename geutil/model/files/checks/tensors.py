"""Constants and shapes, as protos: does the payload agree with type and shape?"""

from __future__ import annotations

import functools
import math

import tensorflow as tf

from geutil.graph.protos import DATA_TYPES, TensorProto, TensorShapeProto
from geutil.model.errors import ModelError

MOST_BYTES = 2**31
"""What a constant may take in memory: one stored in full cannot be larger."""

MOST_DIMENSIONS = 254
_MOST_ELEMENTS = 2**63 - 1
_STRING_BYTES = 24

_VALUES: dict[tf.DType, str] = {
    tf.float32: "float_val",
    tf.float64: "double_val",
    tf.int32: "int_val",
    tf.uint8: "int_val",
    tf.int16: "int_val",
    tf.int8: "int_val",
    tf.uint16: "int_val",
    tf.qint8: "int_val",
    tf.quint8: "int_val",
    tf.qint16: "int_val",
    tf.quint16: "int_val",
    tf.qint32: "int_val",
    tf.string: "string_val",
    tf.complex64: "scomplex_val",
    tf.complex128: "dcomplex_val",
    tf.int64: "int64_val",
    tf.bool: "bool_val",
    tf.float16: "half_val",
    tf.bfloat16: "half_val",
    tf.uint32: "uint32_val",
    tf.uint64: "uint64_val",
    tf.resource: "resource_handle_val",
    tf.variant: "variant_val",
}
# Where each element takes two numbers.
_PAIRS = {tf.complex64, tf.complex128}
# Elements of these have no fixed size in a proto.
_UNSIZED = {tf.string, tf.resource, tf.variant}


def check_type(number: int) -> None:
    """Raise `ModelError` unless `number` is that of a data type."""
    if number not in DATA_TYPES:
        raise ModelError(
            f"holds data type {number}, which TensorFlow {tf.__version__} does not know"
        )


def type_name(number: int) -> str:
    """Return the name of a data type, for messages."""
    dtype = _dtype(number)
    return f"data type {number}" if dtype is None else str(dtype.name)


def check_shape(shape: TensorShapeProto, *, full: bool = False) -> int:
    """Check a shape, and return the product of its known sizes.

    Args:
        shape: the shape.
        full: unknown sizes are refused too.

    Raises:
        ModelError: a size is negative (-1 stands for an unknown one), or there are too
            many dimensions or elements.
    """
    if full and shape.unknown_rank:
        raise ModelError("holds a constant of unknown shape")
    sizes = [d.size for d in shape.dim]
    if len(sizes) > MOST_DIMENSIONS:
        raise ModelError(
            f"holds a shape of {len(sizes)} dimensions; accepted: {MOST_DIMENSIONS}"
        )
    if sizes and min(sizes) < (0 if full else -1):
        raise ModelError(f"holds a shape with a negative size: {sizes}")
    count = math.prod(size for size in sizes if size >= 0)
    if count > _MOST_ELEMENTS or any(size > _MOST_ELEMENTS for size in sizes):
        raise ModelError(f"holds a shape of too many elements: {sizes}")
    return count


def check_tensor(tensor: TensorProto) -> None:
    """Check a constant, and the constants within it, if it is a variant.

    Raises:
        ModelError: its type is unknown, its shape is impossible, its payload does not
            agree with them, or it would take more than `MOST_BYTES`.

    Cost: constant; the payload is not read.
    """
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        _check_one(tensor)
        for variant in tensor.variant_val:
            pending += variant.tensors


def _check_one(tensor: TensorProto) -> None:
    check_type(tensor.dtype)
    count = check_shape(tensor.tensor_shape, full=True)
    kind = _dtype(tensor.dtype)
    if kind is None:
        return
    size = _STRING_BYTES if kind in _UNSIZED else kind.size
    if count * size > MOST_BYTES:
        raise ModelError(
            f"holds a constant of {count * size} bytes: {kind.name} of shape "
            f"{[d.size for d in tensor.tensor_shape.dim]}; accepted are {MOST_BYTES}"
        )
    content = len(tensor.tensor_content)
    if content:
        if kind not in _UNSIZED and _bits(kind) >= 8 and content != count * size:
            raise ModelError(
                f"holds {content} bytes, but the constant's shape asks for "
                f"{count * size}"
            )
        return
    field = _VALUES.get(kind)
    if field is None:
        return
    values = len(getattr(tensor, field)) // (2 if kind in _PAIRS else 1)
    if values > count:
        raise ModelError(
            f"holds {values} values, but the constant's shape asks for {count}"
        )


@functools.cache
def _dtype(number: int) -> tf.DType | None:
    """Return a data type, or None for one without a size."""
    try:
        dtype = tf.dtypes.as_dtype(number)
        sized = dtype in _UNSIZED or dtype.size > 0
    except (TypeError, KeyError, AttributeError):
        return None
    return dtype if sized else None


def _bits(dtype: tf.DType) -> int:
    # int4, uint2, float4_e2m1fn: packed in some places, a byte each in others.
    if any(mark in dtype.name for mark in ("int2", "int4", "float4")):
        return 4
    return int(dtype.size) * 8
