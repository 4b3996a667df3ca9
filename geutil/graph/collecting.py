"""Graph collections: which ones an op or tensor is in."""

from __future__ import annotations

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
    # vars() and not getattr(): GraphKeys.VARIABLES logs a deprecation when it is read.
    attributes = vars(tf.compat.v1.GraphKeys).items()
    return frozenset(
        value
        for key, value in attributes
        if not key.startswith("__") and isinstance(value, str)
    )
