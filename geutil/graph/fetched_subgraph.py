"""The part of a graph that runs for some fetches, and functions for another process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph import _tf, adjacency, creation, op_types, resource_variables
from geutil.graph._tf import IsMklEnabled, TraceLiteral
from geutil.graph.protos import AttrValue
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import closure


def bound_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[tuple[Any, Tensor]]:
    """Return (outside tensor, placeholder) for each argument and capture of a call."""
    # `traced_from` is the `tf.function` that it is a trace of, which knows the
    # defaults.
    captured = list(function.captured_inputs)
    inputs = list(function.inputs)
    if function.function_type is None:
        values = [tf.convert_to_tensor(value) for value in args]
    else:
        values = _canonical(function.function_type, args, kwargs, traced_from)
    argument_count = len(inputs) - len(captured)
    if len(values) != argument_count:
        raise TypeError(f"{len(values)} values for {argument_count} tensor arguments")
    return list(zip([*values, *captured], inputs, strict=True))


def _canonical(
    kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[Tensor]:
    """Return the tensors that a call passes to a trace of some type."""
    function_type, defaults = kind, None
    if traced_from is not None:
        function_type, defaults = traced_from.function_type, traced_from._default_values
    else:
        kwargs = {**_fixed(kind, args, kwargs), **kwargs}
    bound = _tf.canonicalize_function_inputs(
        tuple(args), dict(kwargs), function_type, defaults
    )
    # A trace has a parameter for each value that `*args` takes.
    bound = kind.bind(*bound.args, **bound.kwargs)
    return list(kind.unpack_inputs(bound))


def _fixed(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Python that a trace was made for and a call leaves out."""
    call_arguments = kind.bind_partial(*args, **kwargs).arguments
    return {
        name: parameter.type_constraint.value
        for name, parameter in kind.parameters.items()
        if name not in call_arguments
        and isinstance(parameter.type_constraint, TraceLiteral)
    }


def is_compiled(function: Any) -> bool:
    """Tell whether a ConcreteFunction is compiled by XLA when it is called."""
    attributes = function.function_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def value_behind(handle: Any) -> Any:
    """Return the value of the variable that an eager handle leads to, or None."""
    dtype = resource_variables.dtype_behind(handle)
    if dtype is None:
        return None
    with tf.init_scope():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def uses_onednn() -> bool:
    """Tell whether TensorFlow uses oneDNN, and with it the allocator that counts."""
    return bool(IsMklEnabled())


def step_ops(
    fetches: Iterable[Operation],
    feeds: IdentitySet,
    *,
    without: Collection[Operation] = (),
) -> list[Operation]:
    """Return the ops that run for `fetches`, in graph order."""
    # Nothing behind `feeds` runs; the ops of `without` are assumed to have no control
    # inputs.

    def needed(op: Operation) -> list[Operation]:
        behind = [t.op for t in op.inputs if t not in feeds]
        return behind if op in without else [*behind, *op.control_inputs]

    return adjacency.graph_order(closure(fetches, needed))


def step_graph_def(
    graph: Graph, ops: Sequence[Operation], feeds: Iterable[Tensor]
) -> Any:
    """Return a self-contained `GraphDef` of ops."""
    # A placeholder stands in the place of a tensor that is fed, and a variable in the
    # place of a handle that a function captures. Colocation is left out.
    graph_def = creation.graph_def_of(graph, ops)
    graph_def.library.CopyFrom(graph.as_graph_def().library)
    fed = {_reference(t): t for t in feeds if t.op.type not in op_types.PLACEHOLDERS}
    stand_ins = {name: _stand_in(graph_def, t) for name, t in fed.items()}
    for node, op in zip(graph_def.node, ops, strict=False):
        if stand_ins:
            for i, name in enumerate(node.input):
                # An op whose inputs were set anew writes a first output with its index.
                node.input[i] = stand_ins.get(name.removesuffix(":0"), name)
        if op.type in op_types.PLACEHOLDERS and op.outputs[0].dtype == tf.resource:
            _make_variable(node, op.outputs[0])
    return graph_def


def _reference(tensor: Tensor) -> str:
    """Return how a node names the tensor among its inputs."""
    name = tensor.op.name
    return f"{name}:{tensor.value_index}" if tensor.value_index else name


def _stand_in(graph_def: Any, tensor: Tensor) -> str:
    name = f"{tensor.op.name}_fed_{tensor.value_index}"
    node = graph_def.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    return name


def _make_variable(node: Any, handle: Tensor) -> None:
    """Turn the placeholder of a captured handle into a variable's own op."""
    data = _tf.get_resource_handle_data(handle)
    behind = list(data.shape_and_type) if data is not None and data.is_set else []
    if len(behind) != 1:
        return
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].CopyFrom(AttrValue(type=behind[0].dtype))
    node.attr["shape"].shape.CopyFrom(behind[0].shape)
    node.attr["shared_name"].s = node.name.encode()
