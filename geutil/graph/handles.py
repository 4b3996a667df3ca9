"""What a resource handle leads to."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.graph._tf import get_resource_handle_data


def dtype_behind(handle: Any) -> tf.DType | None:
    """Return the dtype of the variable that an eager handle leads to.

    None if it leads to no variable, but to a table or the like.
    """
    data = getattr(handle, "_handle_data", None)
    behind = list(data.shape_and_type) if data is not None and data.is_set else []
    # Of a table there are two, of keys and of values.
    if handle.dtype != tf.resource or len(behind) != 1:
        return None
    return tf.as_dtype(behind[0].dtype)


def shape_behind(handle: Any) -> tf.TensorShape | None:
    """Return the shape of the variable that a handle in a graph leads to, if known."""
    data = get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.TensorShape(data.shape_and_type[0].shape)
