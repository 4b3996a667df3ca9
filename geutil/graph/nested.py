"""Nested structures of Python containers.

Dicts, named tuples, lists and tuples nest; anything else is a leaf. Tensors and
variables are leaves: iterating over one would add ops to its graph. So are arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.types import is_op


def is_leaf(obj: object) -> bool:
    """Tell whether `obj` is no container."""
    return (
        is_op(obj)
        or isinstance(obj, str | bytes | np.ndarray | tf.Tensor | tf.Variable)
        or not isinstance(obj, Iterable)
    )


def flatten(tree: Any) -> list[Any]:
    """Return the leaves of `tree`, depth first.

    Example:
        >>> from geutil.graph.nested import flatten
        >>> flatten({"a": 1, "b": [2, (3,)]})
        [1, 2, 3]
    """
    leaves: list[Any] = []
    stack: list[Iterator[Any]] = [iter([tree])]
    while stack:
        for node in stack[-1]:
            if is_leaf(node):
                leaves.append(node)
                continue
            children = node.values() if isinstance(node, Mapping) else node
            stack.append(iter(children))
            break
        else:
            stack.pop()
    return leaves


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure like `tree` whose leaves are `function(leaf)`.

    Dicts keep their class, order and keys; named tuples their class. Other iterables
    (sets, generators, views) become tuples. The depth of the nesting is bounded by
    Python's recursion limit: this nests over containers, never over a graph.

    Example:
        >>> from geutil.graph.nested import map_leaves
        >>> map_leaves({"a": 1, "b": [2, (3,)]}, lambda x: 10 * x)
        {'a': 10, 'b': [20, (30,)]}
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(child, function) for key, child in tree.items()}
        if not isinstance(tree, MutableMapping):
            return mapped
        # A copy keeps what the class adds, such as a defaultdict's factory.
        result = copy.copy(tree)
        result.update(mapped)
        return result
    children = [map_leaves(child, function) for child in tree]
    if isinstance(tree, tuple):
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return children if isinstance(tree, list) else tuple(children)
