"""Function bodies: which functions an op names, and carrying them to another graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensorflow.core.framework import function_pb2

from geutil.graph.kinds import Graph, Operation


def functions_of_attributes(attributes: Any) -> Iterator[str]:
    """Yield the names of the functions in a map of `AttrValue` protos."""
    for value in attributes.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            yield from (func.name for func in value.list.func)


def functions_of_op(op: Operation) -> list[str]:
    """Return the names of the functions that `op` calls, each once."""
    names = functions_of_attributes(op.node_def.attr)
    return list(dict.fromkeys(name for name in names if name))


def has_function(graph: Graph, name: str) -> bool:
    """Tell whether `graph` holds a function called `name`."""
    return bool(graph._is_function(name))


def library_of(graph: Graph, names: Iterable[str]) -> Any:
    """Return a `FunctionDefLibrary` with `names` and all that they call.

    Gradient definitions of the functions are included. Functions that the graph does
    not hold (ops registered in C++ under the same name) are left out.

    Cost: none when the graph holds none of `names`; else one serialization of the
    graph.
    """
    names = [name for name in names if has_function(graph, name)]
    if not names:
        return function_pb2.FunctionDefLibrary()
    whole = graph.as_graph_def(from_version=graph.version).library
    bodies = {function.signature.name: function for function in whole.function}
    gradients = {g.function_name: g.gradient_func for g in whole.gradient}
    wanted = dict.fromkeys(names)
    queue = list(wanted)
    for name in queue:
        called = [f for n in bodies[name].node_def for f in functions_of_node(n)]
        if name in gradients:
            called.append(gradients[name])
        for other in called:
            if other in bodies and other not in wanted:
                wanted[other] = None
                queue.append(other)
    library = type(whole)()
    library.function.extend(bodies[name] for name in wanted)
    library.gradient.extend(g for g in whole.gradient if g.function_name in wanted)
    return library


def functions_of_node(node_def: Any) -> Iterator[str]:
    """Yield the functions that a `NodeDef` names: its op, or in its attributes."""
    yield node_def.op
    yield from functions_of_attributes(node_def.attr)
