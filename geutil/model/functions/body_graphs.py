"""From the definition of a function to a graph that can be edited, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph.bodies import flat_body
from geutil.graph.function_defs import define
from geutil.graph.function_graphs import new_function_graph
from geutil.graph.functions import add_functions
from geutil.graph.importing import add_control_edges, neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.model.errors import ModelError
from geutil.model.programs.building import ops_to_run
from geutil.model.programs.materializing import (
    SIDE_EFFECTS,
    Parts,
    make_sink,
    release_colocation,
)
from geutil.transform.body_graphs import import_nodes, make_arguments, side_effects

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
        arguments = make_arguments(graph, flat, handles)
        tensor = import_nodes(graph, flat, arguments, release_colocation)
    except TransformError as error:
        raise ModelError(f"function '{name}' cannot be opened: {error}") from error
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error

    results = {r.name: _behind_copies(tensor(r.tensor)) for r in flat.results}
    effects = side_effects(graph, flat)
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


def definition_of(
    graph: Graph,
    name: str,
    inputs: Mapping[str, Tensor],
    outputs: Outputs,
    effects: Operation,
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a body's graph as it is now.

    Raises:
        ModelError: a result depends on a placeholder that is no argument, or TensorFlow
            refuses the function.
    """
    sinks = outputs.sinks
    ops = ops_to_run(graph, inputs, sinks, effects)
    own = {id(op) for op in (*sinks.values(), effects)}
    own |= {id(t.op) for t in inputs.values()}
    try:
        return define(
            graph,
            name,
            [op for op in ops if id(op) not in own],
            list(inputs.values()),
            dict(outputs),
            effects.control_inputs,
            like,
        )
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error


def result_shapes(parts: Parts) -> list[tf.TensorShape]:
    """Return the static shapes of the results, as TensorFlow infers them."""
    return [sink.inputs[0].shape for sink in parts.sinks.values()]
