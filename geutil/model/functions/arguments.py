"""What callers pass for an argument that a function is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.graph.function_calls import Caller
from geutil.graph.function_graphs import stand_in_for
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor, is_tensor, type_name
from geutil.model.errors import ModelError
from geutil.model.programs.program import legal_name
from geutil.select.walks import get_backward_walk_ops

Value: TypeAlias = Any | Callable[[Operation], Any] | Mapping[Operation | str, Any]
"""A constant, a function of the calling op, or a mapping from the op or its name."""


def value_for(caller: Caller, value: Value, spec: tf.TensorSpec) -> Any:
    """Return what one caller passes: a tensor of its graph, or an eager one.

    Raises:
        ModelError: there is none for the caller, or it does not fit.
    """
    op = caller.op
    if isinstance(value, Mapping):
        if op not in value and op.name not in value:
            raise ModelError(
                f"there is no value for the caller '{op.name}'; add it to the mapping"
            )
        value = value[op] if op in value else value[op.name]
    if callable(value) and not isinstance(value, tf.Variable):
        with op.graph.as_default():
            value = value(op)
    if is_tensor(value):
        _check_tensor(op, value, spec)
        return value
    return _eager(value, spec)


def _check_tensor(op: Operation, t: Tensor, spec: tf.TensorSpec) -> None:
    what = f"'{t.name}' cannot be passed by '{op.name}' as input '{spec.name}'"
    if t.graph is not op.graph:
        raise ModelError(
            f"{what}: it is in another graph; pass a function of the calling op, which "
            "makes it in op.graph"
        )
    if t.dtype != spec.dtype or not spec.shape.is_compatible_with(t.shape):
        raise ModelError(
            f"{what}: it is {t.dtype.name} of shape {t.shape}, and the input "
            f"{spec.dtype.name} of shape {spec.shape}"
        )
    if op in set(get_backward_walk_ops([t.op], control_inputs=True)):
        raise ModelError(f"{what}: it depends on what '{op.name}' returns")


def _eager(value: Any, spec: tf.TensorSpec) -> Any:
    if isinstance(value, tf.Variable) and spec.dtype == tf.resource:
        return value.handle
    try:
        eager = tf.convert_to_tensor(value, spec.dtype)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ModelError(
            f"a {type_name(value)} cannot be passed as input '{spec.name}' "
            f"({spec.dtype.name}): {error}"
        ) from error
    if not spec.shape.is_compatible_with(eager.shape):
        raise ModelError(
            f"a value of shape {eager.shape} cannot be passed as input '{spec.name}', "
            f"which is of shape {spec.shape}"
        )
    return value if isinstance(value, tf.Variable) else eager


def in_graph(graph: Graph, value: Any, name: str) -> Tensor:
    """Return a value as a tensor of a graph; variables and resources are captured."""
    if is_tensor(value):
        return value
    if isinstance(value, tf.Variable):
        with neutral(graph):
            return tf.identity(value, name=legal_name(name))
    if value.dtype in (tf.resource, tf.variant):
        return stand_in_for(graph, value, legal_name(name))
    with neutral(graph):
        return tf.constant(value.numpy(), value.dtype, name=legal_name(name))
