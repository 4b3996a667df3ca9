"""Definitions of functions: from a graph's library to a graph, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph._tf import (
    CppShapeInferenceResult,
    TF_DeleteFunction,
    TF_FunctionToFunctionDef,
    TF_GetBuffer,
    TF_GraphToFunction_wrapper,
    get_handle_data,
    set_handle_data,
    tf_buffer,
)
from geutil.graph.bodies import Arg
from geutil.graph.function_registry import called_names
from geutil.graph.importing import import_ops
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.protos import FunctionDef

_OF_THE_OLD_BODY = frozenset(
    (
        "_input_shapes",
        "_construction_context",
        "_implements",
        "api_implements",
        "api_preferred_device",
        "forward_function_name",
        "backward_function_name",
        "_original_func_name",
    )
)
"""Attributes that name shapes, twins or a fused form of a function as it was."""


def definition_in(graph: Graph, name: str) -> Any | None:
    """Return the `FunctionDef` of a function that a graph holds, else None."""
    if not graph._is_function(name):
        return None
    function = graph._get_function(name)
    made_in_c = getattr(function, "_c_func", None)
    if made_in_c is None:
        return function.cached_definition
    # `cached_definition` would put it into the eager context, which refuses a function
    # of a name that it has: one that Grappler has changed, say.
    with tf_buffer() as buffer, made_in_c.get() as c_function:
        TF_FunctionToFunctionDef(c_function, buffer)
        data = TF_GetBuffer(buffer)
    return FunctionDef.FromString(bytes(data))


def make_argument(graph: Graph, arg: Arg, shape: Any) -> Tensor:
    """Make the placeholder of an argument, with what is known of a resource."""
    graph_def = tf.compat.v1.GraphDef()
    # An older producer would make TensorFlow forget that a shape is scalar.
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    node = graph_def.node.add(name=arg.name, op="Placeholder")
    node.attr["dtype"].type = arg.dtype
    value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
    node.attr["shape"].CopyFrom(value)
    for name, attribute in arg.attributes.items():
        if name.startswith("_") and name != "_output_shapes":
            node.attr[name].CopyFrom(attribute)
    (op,) = import_ops(graph, graph_def, {})
    (placeholder,) = op.outputs
    if arg.handle_data:
        handle = CppShapeInferenceResult.HandleData()
        handle.is_set = True
        for data in arg.handle_data:
            handle.shape_and_type.add(shape=data.shape, dtype=data.dtype)
        set_handle_data(placeholder, handle)
    return placeholder


def define(
    graph: Graph,
    name: str,
    ops: Sequence[Operation],
    inputs: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    control_outputs: Sequence[Operation],
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a part of a graph, which is not changed.

    Args:
        graph: the graph.
        name: the name of the function.
        ops: its ops, without the placeholders of its arguments.
        inputs: its arguments.
        outputs: its results by name.
        control_outputs: ops that it runs besides.
        like: the `FunctionDef` that it is made from, for its attributes.

    Raises:
        ValueError: TensorFlow refuses the function.
    """
    with graph._c_graph.get() as c_graph:
        function = TF_GraphToFunction_wrapper(
            c_graph,
            name,
            False,
            [op._c_op for op in ops],
            [t._as_tf_output() for t in inputs],
            [t._as_tf_output() for t in outputs.values()],
            [output.encode() for output in outputs],
            [op._c_op for op in control_outputs],
            [],
            None,
            "",
        )
    try:
        with tf_buffer() as buffer:
            TF_FunctionToFunctionDef(function, buffer)
            data = TF_GetBuffer(buffer)
            definition = FunctionDef.FromString(tf.compat.as_bytes(data))
    finally:
        TF_DeleteFunction(function)
    for key, value in like.attr.items():
        if key not in _OF_THE_OLD_BODY:
            definition.attr[key].CopyFrom(value)
    arguments = zip(definition.signature.input_arg, inputs, strict=True)
    results = zip(definition.signature.output_arg, outputs.values(), strict=True)
    for arg, t in (*arguments, *results):
        _describe_handle(arg, t)
    return definition


def _describe_handle(arg: Any, t: Tensor) -> None:
    """Write into a signature what a resource refers to."""
    if t.dtype != tf.resource or arg.handle_data:
        return
    for known in get_handle_data(t).shape_and_type:
        arg.handle_data.add(shape=known.shape, dtype=known.dtype)


def functions_behind(graph: Graph, definition: Any) -> list[Any]:
    """Return the functions of a graph that a definition calls, however indirectly."""
    waiting = [definition]
    found: dict[str, Any] = {}
    while waiting:
        for name in called_names(waiting.pop().node_def):
            called = None if name in found else definition_in(graph, name)
            if called is not None:
                found[name] = called
                waiting.append(called)
    return list(found.values())
