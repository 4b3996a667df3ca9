"""Objects that TensorFlow saves, and the owners of resources."""

from __future__ import annotations

import gc
from typing import Any

import tensorflow as tf


def new_trackable() -> Any:
    """Return an object whose attributes are saved in a SavedModel."""
    return tf.__internal__.tracking.AutoTrackable()


def owner_of(handle: Any) -> Any:
    """Return the object that holds a resource handle as its `resource_handle`.

    A function captures the handle of a table and not the table; TensorFlow can save the
    table only. None if no such object is alive.

    Cost: one scan of the objects that refer to the handle.
    """
    for referrer in gc.get_referrers(handle):
        holders = [referrer]
        if isinstance(referrer, dict):
            # Before Python 3.11, and for some objects after it, attributes are held by
            # a dictionary.
            holders = gc.get_referrers(referrer)
        for holder in holders:
            if _is_owner(holder, handle):
                return holder
    return None


def _is_owner(obj: Any, handle: Any) -> bool:
    kind = type(obj)
    if not hasattr(kind, "resource_handle") or not hasattr(kind, "_create_resource"):
        return False
    return obj.resource_handle is handle
