"""From the definition of a function to a graph that can be edited, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph.bodies import Body as FlatBody
from geutil.graph.bodies import flat_body
from geutil.graph.function_defs import define, make_argument
from geutil.graph.function_graphs import new_function_graph
from geutil.graph.functions import add_functions
from geutil.graph.importing import add_control_edges, import_ops, neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.placeholders import copy_handle_data
from geutil.model.errors import ModelError
from geutil.model.programs.building import ops_to_run
from geutil.model.programs.materializing import (
    SIDE_EFFECTS,
    Parts,
    make_sink,
    release_colocation,
)
from geutil.model.programs.program import canonical

if TYPE_CHECKING:
    from geutil.model.ends import Outputs


def materialize_body(
    definition: Any, library: Mapping[str, Any], handles: Mapping[str, Tensor]
) -> Parts:
    """Make an editable graph of a function's definition.

    Args:
        definition: a `FunctionDef`.
        library: the functions that it calls, however indirectly, by name.
        handles: for arguments that are resources, a tensor that a caller passes: the
            body learns from it what is behind the handle.

    Raises:
        ModelError: the definition is damaged, or TensorFlow refuses its nodes.

    Cost: linear in nodes and edges.
    """
    name = definition.signature.name
    try:
        flat = flat_body(definition, library)
        graph = new_function_graph(name)
        add_functions(graph, library.values())
        arguments = _make_arguments(graph, flat, handles)
        _import_nodes(graph, flat, arguments)
    except TransformError as error:
        raise ModelError(f"function '{name}' cannot be opened: {error}") from error
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error

    def tensor(where: str) -> Tensor:
        found = arguments.get(where)
        return graph.get_tensor_by_name(canonical(where)) if found is None else found

    results = {r.name: _behind_copies(tensor(r.tensor)) for r in flat.results}
    effects = _side_effects(graph, flat)
    with neutral(graph):
        waiting = tf.no_op(SIDE_EFFECTS)
    add_control_edges(waiting, effects)
    sinks = {result: make_sink(graph, result, t) for result, t in results.items()}
    return Parts(graph, arguments, sinks, waiting, [])


def _behind_copies(t: Tensor) -> Tensor:
    """Return what a result is before the Identity ops that tracing puts behind it."""
    while (
        t.op.type == "Identity"
        and t.op.name.rpartition("/")[2].startswith("Identity")
        and not t.consumers()
        and not t.op.control_inputs
    ):
        (t,) = t.op.inputs
    return t


def _make_arguments(
    graph: Graph, flat: FlatBody, handles: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    arguments = {}
    for arg in flat.args:
        shapes = arg.attributes.get("_output_shapes")
        known = shapes.list.shape[0] if shapes and shapes.list.shape else None
        arguments[arg.name] = make_argument(graph, arg, tf.TensorShape(known))
        if arg.name in handles and not arg.handle_data:
            copy_handle_data(handles[arg.name], arguments[arg.name])
    return arguments


def _import_nodes(graph: Graph, flat: FlatBody, arguments: dict[str, Tensor]) -> None:
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    graph_def.node.extend(flat.node_defs())
    read: set[str] = set()
    for node in graph_def.node:
        # Arguments are there before anything runs; there is nothing to wait for.
        inputs = [
            n for n in node.input if n.removeprefix("^") not in arguments or n[0] != "^"
        ]
        if len(inputs) < len(node.input):
            del node.input[:]
            node.input.extend(inputs)
        read.update(name for name in inputs if name in arguments)
    release_colocation(graph_def)
    fed = {canonical(name): arguments[name] for name in arguments if name in read}
    import_ops(graph, graph_def, fed)


def _side_effects(graph: Graph, flat: FlatBody) -> list[Operation]:
    """Return the ops that a call runs besides what the results need.

    Functions of version 1 do not name them: TensorFlow runs all that have a state.
    """
    if flat.control_results:
        names = dict.fromkeys(node for _, node in flat.control_results)
        return [graph.get_operation_by_name(name) for name in names]
    ends = {r.tensor.partition(":")[0] for r in flat.results}
    return [
        op
        for op in graph.get_operations()
        if op.op_def.is_stateful
        and op.name not in ends
        and not any(t.consumers() for t in op.outputs)
        and op.type != "Placeholder"
    ]


def definition_of(
    graph: Graph,
    name: str,
    inputs: Mapping[str, Tensor],
    outputs: Outputs,
    side_effects: Operation,
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a body's graph as it is now.

    Raises:
        ModelError: a result depends on a placeholder that is no argument, or TensorFlow
            refuses the function.
    """
    sinks = outputs.sinks
    ops = ops_to_run(graph, inputs, sinks, side_effects)
    own = {id(op) for op in (*sinks.values(), side_effects)}
    own |= {id(t.op) for t in inputs.values()}
    try:
        return define(
            graph,
            name,
            [op for op in ops if id(op) not in own],
            list(inputs.values()),
            dict(outputs),
            side_effects.control_inputs,
            like,
        )
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error


def result_shapes(parts: Parts) -> list[tf.TensorShape]:
    """Return the static shapes of the results, as TensorFlow infers them."""
    return [sink.inputs[0].shape for sink in parts.sinks.values()]
