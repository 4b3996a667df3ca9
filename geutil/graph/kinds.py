"""What counts as an op, a tensor and a graph."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import ArgumentTypeError

Graph: TypeAlias = tf.Graph
Operation: TypeAlias = tf.Operation
Tensor: TypeAlias = tf.Tensor
Element: TypeAlias = Any
"""An op or a tensor."""


def is_graph(obj: object) -> bool:
    """Tell whether `obj` is a `tf.Graph` (a FuncGraph is one too)."""
    return isinstance(obj, tf.Graph)


def is_op(obj: object) -> bool:
    """Tell whether `obj` is a `tf.Operation`."""
    return isinstance(obj, tf.Operation)


def is_tensor(obj: object) -> bool:
    """Tell whether `obj` is a symbolic tensor: one that an op of a graph yields."""
    return isinstance(obj, tf.Tensor) and getattr(obj, "graph", None) is not None


def is_reference(tensor: Tensor) -> bool:
    """Tell whether `tensor` is a reference to a version 1 variable."""
    return bool(tensor.dtype._is_ref_dtype)


def is_func_graph(graph: Graph) -> bool:
    """Tell whether `graph` is the graph of a `tf.function` body."""
    return bool(graph.building_function)


def type_name(obj: object) -> str:
    """Return the qualified type of `obj`, for messages."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def require_graph(graph: object) -> None:
    """Raise `ArgumentTypeError` unless `graph` is a `tf.Graph`."""
    if not is_graph(graph):
        raise ArgumentTypeError(f"expected a tf.Graph, got {type_name(graph)}")


def require_op(op: object) -> None:
    """Raise `ArgumentTypeError` unless `op` is a `tf.Operation`."""
    if not is_op(op):
        raise ArgumentTypeError(f"expected a tf.Operation, got {type_name(op)}")


def eager_hint(obj: object) -> str:
    """Return what to add to a refusal of `obj` when it is an eager tensor."""
    eager = isinstance(obj, tf.Tensor) and not is_tensor(obj)
    return "; eager tensors belong to no graph" if eager else ""


def require_tensor(tensor: object) -> None:
    """Raise `ArgumentTypeError` unless `tensor` belongs to a graph."""
    if not is_tensor(tensor):
        raise ArgumentTypeError(
            f"expected a tf.Tensor of a graph, got {type_name(tensor)}"
            f"{eager_hint(tensor)}"
        )
