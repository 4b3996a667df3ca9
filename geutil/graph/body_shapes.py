"""The body of a function with the shapes of one call's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph._tf import FunctionDef, function_def_to_graph
from geutil.graph.function_defs import definition_in
from geutil.graph.kinds import Graph, Tensor


def body_for_call(
    graph: Graph, name: str, arguments: Sequence[Tensor] | None
) -> Graph | None:
    """Return a new graph of a function's ops, with shapes inferred from a call.

    Args:
        graph: the graph that holds the function and the call.
        name: the name of the function.
        arguments: what the call passes; None for the shapes of the trace. What comes
            after the function's own arguments is left out: a SymbolicGradient passes
            gradients there.

    Returns:
        A FuncGraph that holds the functions which the body calls, or None where the
        graph does not hold the function.

    Cost: linear in the ops of the body, and of the functions behind it.
    """
    held = definition_in(graph, name)
    if held is None:
        return None
    definition = FunctionDef()
    definition.CopyFrom(held)
    # A resource's own shape says nothing of what it refers to.
    taken = list(arguments or ())[: len(definition.signature.input_arg)]
    shapes = [None if t.dtype == tf.resource else t.shape for t in taken]
    for i, shape in enumerate(shapes):
        # TensorFlow would take the shape of the trace instead.
        if shape is not None and shape.rank is not None and i in definition.arg_attr:
            definition.arg_attr[i].attr.pop("_output_shapes", None)
    with graph.as_default():
        return function_def_to_graph(
            definition, input_shapes=shapes or None, include_library_functions=True
        )
