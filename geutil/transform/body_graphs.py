"""From the body of a function to a graph: arguments, nodes and side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from geutil.graph.bodies import Body
from geutil.graph.function_defs import make_argument
from geutil.graph.importing import import_ops
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.placeholders import copy_handle_data


def make_arguments(
    graph: Graph, body: Body, passed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Make placeholders for the arguments of a body, and return them by name.

    Args:
        graph: the graph.
        body: the body.
        passed: what a caller passes for arguments: of resources, the placeholders learn
            from it what is behind the handle.

    Cost: linear in the arguments.
    """
    made = {}
    for arg in body.args:
        shapes = arg.attributes.get("_output_shapes")
        known = shapes.list.shape[0] if shapes and shapes.list.shape else None
        made[arg.name] = make_argument(graph, arg, tf.TensorShape(known))
        if arg.name in passed and not arg.handle_data:
            copy_handle_data(passed[arg.name], made[arg.name])
    return made


def import_nodes(
    graph: Graph,
    body: Body,
    arguments: Mapping[str, Tensor],
    release: Callable[[Any], None],
) -> Callable[[str], Tensor]:
    """Import the nodes of a body.

    Args:
        graph: the graph.
        body: the body.
        arguments: the placeholders of its arguments by name.
        release: takes from a `GraphDef` the colocation with nodes that are not in it;
            TensorFlow refuses that.

    Returns:
        What finds tensors by the names that they have in the body.

    Cost: linear in nodes and edges.
    """
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    graph_def.node.extend(body.node_defs())
    read: set[str] = set()
    for node in graph_def.node:
        # Arguments are there before anything runs; there is nothing to wait for.
        inputs = [n for n in node.input if n[0] != "^" or n[1:] not in arguments]
        del node.input[:]
        node.input.extend(inputs)
        read.update(n for n in inputs if n in arguments)
    release(graph_def)
    fed = {f"{name}:0": t for name, t in arguments.items() if name in read}
    import_ops(graph, graph_def, fed)

    def tensor(where: str) -> Tensor:
        if where in arguments:
            return arguments[where]
        return graph.get_tensor_by_name(where if ":" in where else f"{where}:0")

    return tensor


def side_effects(graph: Graph, body: Body) -> list[Operation]:
    """Return the ops that a call runs besides what the results need.

    Functions of version 1 do not name them: TensorFlow runs all that have a state.

    Args:
        graph: the graph of the body, in which nothing reads the results yet.
        body: the body.

    Cost: linear in the ops.
    """
    if body.control_results:
        names = dict.fromkeys(node for _, node in body.control_results)
        return [graph.get_operation_by_name(name) for name in names]
    ends = {r.tensor.partition(":")[0] for r in body.results}
    return [
        op
        for op in graph.get_operations()
        if op.op_def.is_stateful
        and op.name not in ends
        and op.type != "Placeholder"
        and not any(t.consumers() for t in op.outputs)
    ]
