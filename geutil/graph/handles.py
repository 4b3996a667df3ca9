"""What a resource handle leads to."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def dtype_behind(handle: Any) -> tf.DType | None:
    """Return the dtype of the variable that an eager handle leads to.

    None if it leads to no variable, but to a table or the like.
    """
    data = getattr(handle, "_handle_data", None)
    if handle.dtype != tf.resource or data is None or not data.is_set:
        return None
    (behind,) = data.shape_and_type if len(data.shape_and_type) == 1 else (None,)
    return None if behind is None else tf.as_dtype(behind.dtype)
