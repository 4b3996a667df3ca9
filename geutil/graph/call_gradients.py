"""Gradients of calls in graphs that were made from protobufs.

`tf.function` keeps the gradient of a call in Python, and writes into the node a name
that means nothing anywhere else. Without either, TensorFlow falls back on gradients
written in C++, which many ops lack, loops among them. Here one gradient serves the
calls of geutil's graphs: it looks up what the op calls, and lets TensorFlow
differentiate that. It is registered for the op types, so it is found in bodies of
bodies too, and nothing of it is written into a model. A call in a graph that is not
geutil's falls back as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from geutil.graph._tf import (
    MONOMORPHIC_FUNCTION_ALLOWLIST,
    ConcreteFunction,
    copy_handle_data,
    function_def_to_graph,
    get_handle_data,
    symbolic_gradient,
)
from geutil.graph.functions import (
    add_functions,
    publish_functions,
    with_own_control_flow,
)
from geutil.graph.gradient_registry import ATTRIBUTE, registered_names
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.loop_handles import carry_loop_handles
from geutil.graph.op_types import CALLS
from geutil.graph.state import is_own_graph, state_of

_OWN = re.compile(rb"(Stateful)?PartitionedCall-\d+")
"""What `tf.function` writes there by itself."""
_SHAPES = "_input_shapes"


def names_own_gradient(node: Any) -> bool:
    """Tell whether a node is a call that names the gradient of a traced function."""
    if node.op not in CALLS or ATTRIBUTE not in node.attr:
        return False
    return _OWN.fullmatch(node.attr[ATTRIBUTE].s) is not None


def forget_own_gradient(node: Any) -> None:
    """Make a call name no gradient, unless somebody gave it one on purpose."""
    if names_own_gradient(node):
        del node.attr[ATTRIBUTE]


def _call_gradient(op: Operation, *grads: Any) -> Any:
    """Let TensorFlow differentiate the function that `op` calls.

    TensorFlow gives the op more outputs, which its gradient reads; a second gradient
    of the op has to know them, so the op remembers what differentiates it.
    """
    if not any(is_own_graph(graph) for graph in _around(op.graph)):
        known = [
            tf.zeros_like(t) if grad is None else grad
            for grad, t in zip(grads, op.outputs, strict=True)
        ]
        return symbolic_gradient(op, known)
    gradient = _function_of(op)._get_gradient_function()
    op._gradient_function = gradient
    return gradient(op, *grads)


for _type in sorted(CALLS):
    if _type not in registered_names():
        tf.RegisterGradient(_type)(_call_gradient)


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
        data = get_handle_data(t)
        return "", data.SerializeToString(deterministic=True)
    return str(t.shape), b""


def _around(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and those around it, outwards."""
    around: Any = graph
    while around is not None:
        yield around
        around = getattr(around, "outer_graph", None)


def _holder(graph: Graph, name: str) -> Graph:
    """Return the outermost graph around `graph` that knows the function."""
    holders = [around for around in _around(graph) if around._is_function(name)]
    if not holders:
        raise LookupError(
            f"'{name}' cannot be differentiated: no graph holds the function"
        )
    return holders[-1]


def _concrete_function(graph: Graph, name: str, op: Operation) -> Any:
    """Return a function that does what `op` calls and that TensorFlow differentiates.

    Its loops and conditionals have bodies of their own: TensorFlow names what it makes
    of a body after the body, and two such things must not have the same name.
    """
    known = graph._get_function(name).cached_definition
    definition, library = with_own_control_flow(graph, known)
    add_functions(graph, library.function)
    handles = (tf.resource, tf.variant)
    shapes = [None if t.dtype in handles else t.shape for t in op.inputs]
    with graph.as_default():
        body = function_def_to_graph(definition, shapes)
    for outside, inside in zip(op.inputs, body.inputs, strict=True):
        copy_handle_data(outside, inside)
    carry_loop_handles(body)
    add_functions(body, library.function)
    publish_functions(body)
    allowed = MONOMORPHIC_FUNCTION_ALLOWLIST - {_SHAPES}
    attributes = {k: v for k, v in definition.attr.items() if k in allowed}
    return ConcreteFunction.from_func_graph(body, None, attributes)
