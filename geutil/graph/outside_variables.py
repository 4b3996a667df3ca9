"""Variables that are made while a graph is being traced, and live outside it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.graph._tf import ResourceVariable
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, is_func_graph
from geutil.graph.state import state_of


def variable_outside(graph: Graph, initial: Any, name: str) -> Any:
    """Return a new resource variable that is not trained.

    In the FuncGraph of a `tf.function` it is an eager variable, or one of the v1 graph
    outside; a function that is traced may make it at any call, because it is none of
    the function's own. In a v1 graph it is one of its global variables.

    Args:
        graph: the graph.
        initial: its first value, a numpy array or number.
        name: its name; a v1 graph makes it unique.
    """
    with neutral(graph), tf.init_scope():
        # The class itself: tf.Variable would ask the tracing function to make it.
        return ResourceVariable(initial, trainable=False, name=name)


def handle_in(graph: Graph, variable: Any) -> Any:
    """Return the handle of a variable as ops of a graph can read it.

    A FuncGraph captures it, and keeps the variable alive.
    """
    handle = variable.handle
    if not is_func_graph(graph) or getattr(handle, "graph", None) is graph:
        return handle
    graph.watch_variable(variable)
    # The FuncGraph itself holds variables by weak references.
    state_of(graph).variables[id(variable)] = variable
    return graph.capture(handle)
