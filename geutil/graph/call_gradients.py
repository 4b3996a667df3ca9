"""Gradients of calls in graphs that were made from protobufs.

`tf.function` leaves the gradient of a call in Python, and in the node a name of this
process's registry alone. In another process, or for an edited function, that name means
nothing or something else. Here one gradient serves all calls: it looks up what the op
calls, and lets TensorFlow differentiate that.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import (
    attributes as function_attributes,
)
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.ops import handle_data_util

from geutil.graph.calls import CALLS, names_of_functions
from geutil.graph.gradient_registry import ATTRIBUTE
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.state import state_of

_OWN = re.compile(rb"(Stateful)?PartitionedCall-\d+")
"""What `tf.function` writes there by itself."""
CALL_GRADIENT = f"PartitionedCall-{ops.uid()}"
"""The name of the gradient, in the form that TensorFlow itself uses."""
_SHAPES = "_input_shapes"


def use_call_gradient(node: Any, own: Container[str] = ()) -> None:
    """Make a node that calls a function name this gradient.

    A call whose gradient somebody overrode keeps it.

    Args:
        node: a `NodeDef`.
        own: the functions that have a gradient function of their own.
    """
    if node.op not in CALLS or node.attr["f"].func.name in own:
        return
    named = node.attr[ATTRIBUTE].s if ATTRIBUTE in node.attr else b""
    if not named or _OWN.fullmatch(named):
        node.attr[ATTRIBUTE].s = CALL_GRADIENT.encode()


@tf.RegisterGradient(CALL_GRADIENT)
def _call_gradient(op: Operation, *grads: Any) -> Any:
    """Let TensorFlow differentiate the function that `op` calls.

    TensorFlow gives the op more outputs, which its gradient reads; a second gradient
    of the op has to know them, so the op remembers what differentiates it.
    """
    gradient = _function_of(op)._get_gradient_function()
    op._gradient_function = gradient
    return gradient(op, *grads)


def _function_of(op: Operation) -> Any:
    """Return a concrete function of what `op` calls; calls that are alike share it."""
    name = op.get_attr("f").name
    graph = _holder(op.graph, name)
    known = state_of(graph).call_functions
    key = (name, *(_kind(t) for t in op.inputs))
    if key not in known:
        known[key] = _concrete_function(graph, name, op)
    return known[key]


def _kind(t: Tensor) -> tuple[str, bytes]:
    """Return the static shape of an argument, and what a resource refers to."""
    if t.dtype in (tf.resource, tf.variant):
        data = handle_data_util.get_handle_data(t)
        return "", data.SerializeToString(deterministic=True)
    return str(t.shape), b""


def _holder(graph: Graph, name: str) -> Graph:
    """Return the outermost graph around `graph` that knows the function."""
    holder = None
    around: Any = graph
    while around is not None:
        if around._is_function(name):
            holder = around
        around = getattr(around, "outer_graph", None)
    if holder is None:
        raise LookupError(
            f"'{name}' cannot be differentiated: no graph holds the function"
        )
    return holder


def _concrete_function(graph: Graph, name: str, op: Operation) -> Any:
    definition = graph._get_function(name).cached_definition
    handles = (tf.resource, tf.variant)
    shapes = [None if t.dtype in handles else t.shape for t in op.inputs]
    with graph.as_default():
        body = function_def_to_graph.function_def_to_graph(definition, shapes)
    for outside, inside in zip(op.inputs, body.inputs, strict=True):
        handle_data_util.copy_handle_data(outside, inside)
    for function in _called(graph, definition):
        body._add_function_recursive(function)
    allowed = function_attributes.MONOMORPHIC_FUNCTION_ALLOWLIST - {_SHAPES}
    attributes = {k: v for k, v in definition.attr.items() if k in allowed}
    return ConcreteFunction.from_func_graph(body, None, attributes)


def _called(graph: Graph, definition: Any) -> Iterator[Any]:
    """Yield the functions of `graph` that a definition calls, however indirectly."""
    waiting = [definition]
    known = set()
    while waiting:
        for node in waiting.pop().node_def:
            for name in names_of_functions(node):
                if name not in known and graph._is_function(name):
                    known.add(name)
                    function = graph._get_function(name)
                    waiting.append(function.cached_definition)
                    yield function
