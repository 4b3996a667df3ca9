"""FuncGraphs that are built from parts: bound captures, and functions made of them.

A FuncGraph reads what lies outside (variables, tables) through *captures*: a tensor
inside stands for an eager tensor outside. A function is built from a FuncGraph once; so
the graph that is edited and the graph that a function is built from are two.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph._tf import (
    ConcreteFunction,
    FuncGraph,
    copy_handle_data,
    from_structured_signature,
)
from geutil.graph.functions import publish_functions
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.loop_handles import carry_loop_handles
from geutil.graph.state import state_of


def new_function_graph(name: str) -> Graph:
    """Return an empty FuncGraph that belongs to no other graph."""
    with tf.init_scope():
        graph = FuncGraph(name, collections={})
    state_of(graph).own = True
    return graph


def make_capture_placeholder(
    graph: Graph, name: str, dtype: Any, shape: Any, external: Any
) -> Tensor:
    """Make a placeholder called `name` in `graph` and bind it to a tensor outside."""
    with graph.as_default(), graph.name_scope(None):
        placeholder = tf.compat.v1.placeholder(dtype, shape, name)
    bind(graph, placeholder, external)
    return placeholder


def stand_in_for(graph: Graph, external: Any, name: str) -> Tensor:
    """Return the tensor of a FuncGraph that stands for one outside, made if need be."""
    for outside, inside in bindings(graph):
        if outside is external:
            return inside
    return make_capture_placeholder(
        graph, name, external.dtype, external.shape, external
    )


def bind(graph: Graph, inside: Tensor, external: Any) -> None:
    """Make a tensor of a FuncGraph stand for one outside."""
    if inside.op.type == "Placeholder" and isinstance(external, tf.Tensor):
        copy_handle_data(external, inside)
    graph.replace_capture(external, inside)


def write_stand_in(node: Any, external: Any) -> None:
    """Make a node definition one of an op that can stand for a tensor outside.

    A variable's handle is a VarHandleOp: unlike a placeholder it tells the importer the
    shape and dtype of what is read. Anything else is a placeholder.
    """
    data = getattr(external, "_handle_data", None)
    node.ClearField("attr")
    del node.input[:]
    # Of a table there are two, of keys and of values.
    behind: list[Any] = (
        list(data.shape_and_type) if data is not None and data.is_set else []
    )
    if external.dtype == tf.resource and len(behind) == 1:
        (variable,) = behind
        node.op = "VarHandleOp"
        node.attr["dtype"].type = variable.dtype
        node.attr["shape"].shape.CopyFrom(variable.shape)
        node.attr["shared_name"].s = node.name.encode()
    else:
        node.op = "Placeholder"
        node.attr["dtype"].type = external.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(external.shape.as_proto())


def bindings(graph: Graph) -> list[tuple[Any, Tensor]]:
    """Return (outside tensor, placeholder) for each capture of a FuncGraph.

    Other graphs have none.
    """
    return list(getattr(graph, "captures", ()))


def unbind(graph: Graph, external: Any) -> None:
    """Forget the capture of a tensor outside; its placeholder stays in the graph."""
    graph.function_captures.pop(id(external), is_by_ref=False)


def side_effects(graph: Graph) -> list[Operation]:
    """Return the ops that a call of a FuncGraph's function runs besides its outputs."""
    return list(getattr(graph, "control_outputs", ()))


def set_ends(graph: Graph, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
    """Tell a FuncGraph which tensors its arguments and results are."""
    graph.inputs = list(inputs)
    graph.outputs = list(outputs)


def seen_variables(graph: Graph) -> list[tf.Variable]:
    """Return the live variables that were read while `graph` was the default one.

    In the order in which it captured them.
    """
    by_handle = {id(v.handle): v for v in graph._watched_variables}
    return [by_handle[id(e)] for e, _ in graph.captures if id(e) in by_handle]


def build_function(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    control_outputs: Sequence[Operation],
    variables: Sequence[tf.Variable],
) -> Any:
    """Build a ConcreteFunction from a FuncGraph, which must not be edited thereafter.

    Args:
        graph: the FuncGraph.
        inputs: its arguments; each becomes a keyword.
        outputs: its results; the function returns a dictionary of them.
        control_outputs: ops that run besides.
        variables: the variables that it reads, for `tf.GradientTape`.
    """
    # TensorFlow flattens dictionaries by sorted key in some places and in order of
    # insertion in others; sorted, both are the same.
    inputs = dict(sorted(inputs.items()))
    outputs = dict(sorted(outputs.items()))
    graph.inputs = [*inputs.values(), *(inner for _, inner in graph.captures)]
    graph.outputs = list(outputs.values())
    graph.control_outputs = list(control_outputs)
    signature = ((), {_parameter(n): _spec(t, n) for n, t in inputs.items()})
    graph.structured_input_signature = signature
    graph.structured_outputs = {name: _spec(t, name) for name, t in outputs.items()}
    graph.variables = variables
    function_type = from_structured_signature(
        signature, graph.structured_outputs, graph.function_captures.capture_types
    )
    carry_loop_handles(graph)
    publish_functions(graph)
    function = ConcreteFunction.from_func_graph(graph, function_type, attrs={})
    # What saving a signature asks for.
    function._arg_keywords = list(inputs)
    function._num_positional_args = 1 if len(inputs) == 1 else 0
    return function


def call_function(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function made by `build_function`; return its results by name."""
    flat = [arguments[name] for name in function._arg_keywords]
    results: dict[str, Any] = function._call_flat(flat, function.captured_inputs)
    return results


def _parameter(name: str) -> str:
    """Return a name that Python accepts for a parameter."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _spec(tensor: Tensor, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype, name)
