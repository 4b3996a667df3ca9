"""The body of a function with the shapes of one call's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from geutil.graph._tf import function_def_to_graph
from geutil.graph.function_defs import definition_in
from geutil.graph.kinds import Graph, Tensor


def body_for_call(graph: Graph, name: str, arguments: Sequence[Tensor]) -> Graph | None:
    """Return a new graph of a function's ops, with shapes inferred from a call.

    Args:
        graph: the graph that holds the function and the call.
        name: the name of the function.
        arguments: what the call passes.

    Returns:
        A FuncGraph, or None where the graph does not hold the function.

    Cost: linear in the ops of the body.
    """
    definition = definition_in(graph, name)
    if definition is None:
        return None
    shapes = [t.shape for t in arguments]
    with graph.as_default():
        return function_def_to_graph(definition, shapes)
