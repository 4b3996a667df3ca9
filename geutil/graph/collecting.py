"""Graph collections: which ones an op or tensor is in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph.identity import IdentityMap, MutableIdentityMap
from geutil.graph.kinds import Graph, is_op, is_tensor


def collections_of_elements(graph: Graph) -> IdentityMap[list[str]]:
    """Return, for each op and tensor in a collection, the names of its collections.

    Cost: linear in the collections.
    """
    found: MutableIdentityMap[list[str]] = MutableIdentityMap()
    for name in graph.get_all_collection_keys():
        for element in graph.get_collection_ref(name):
            if is_op(element) or is_tensor(element):
                if element not in found:
                    found[element] = []
                found[element].append(name)
    return found


def known_collection_names() -> frozenset[str]:
    """Return the collection names that TensorFlow itself gives a meaning."""
    keys = tf.compat.v1.GraphKeys
    names: Iterable[Any] = (
        getattr(keys, key) for key in dir(keys) if not key.startswith("__")
    )
    return frozenset(name for name in names if isinstance(name, str))
