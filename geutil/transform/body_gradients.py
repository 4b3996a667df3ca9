"""Gradients of `tf.custom_gradient` in the bodies of functions.

Loops, conditionals, recurrent layers and compiled functions hold them. Such a gradient
is a closure over the tensors of the body as it was traced, and TensorFlow makes bodies
anew from their definitions: to differentiate them, and once a graph was imported. And
it saves only those gradients whose body is a graph of Python.
"""

from __future__ import annotations

from typing import Any

from geutil.graph import (
    call_graph,
    function_calls,
    function_defs,
    functions,
    gradient_functions,
)
from geutil.graph.protos import FunctionDef
from geutil.graph.types import Graph
from geutil.graph.walks import topological_order
from geutil.transform import custom_gradients, transformer


def renew(graph: Graph) -> None:
    """Let a graph call bodies whose gradients can be built, and saved."""
    callers: list[function_calls.Caller] = []
    direct: dict[str, None] = {}
    for caller in function_calls.callers_in(graph):
        if all(callee.attribute for callee in caller.callees):
            callers.append(caller)
        else:
            # An op whose type is a function cannot call another one.
            direct.update(dict.fromkeys(caller.names))
    definitions: dict[str, Any] = {}

    def callees(name: str) -> list[str]:
        definitions[name] = function_defs.definition_in(graph, name)
        called = function_defs.called_names(definitions[name].node_def)
        return [n for n in called if function_calls.has_function(graph, n)]

    roots = dict.fromkeys(name for caller in callers for name in caller.names)
    new_names: dict[str, str] = {}
    for name in topological_order(roots, callees):
        definition = definitions[name]
        called = set(function_defs.called_names(definition.node_def))
        if _closures(definition) or not called.isdisjoint(new_names):
            new_names[name] = _renewed(graph, definition, new_names)
    for caller in callers:
        if not new_names.keys().isdisjoint(caller.names):
            function_calls.call_others(caller, new_names)
    kept = topological_order(direct, callees)
    functions.forget_functions(graph, new_names.keys() - set(kept))


def _closures(definition: Any) -> dict[str, str]:
    """Return the nodes of a function whose gradient is a closure, with its name."""
    attribute = gradient_functions.ATTRIBUTE
    named = {
        node.name: node.attr[attribute].s.decode()
        for node in definition.node_def
        if attribute in node.attr
    }
    return {n: g for n, g in named.items() if gradient_functions.is_closure(g)}


def _renewed(graph: Graph, definition: Any, new_names: dict[str, str]) -> str:
    """Give a graph a function like one that it holds; return its name."""
    own = FunctionDef()
    own.CopyFrom(definition)
    own.signature.name = function_defs.unused_name(definition.signature.name)
    for node in own.node_def:
        call_graph.rename_called(node, new_names)
    body = functions.body_of(graph, own)
    for name, gradient in _closures(own).items():
        op = body.get_operation_by_name(name)
        gradient_by_names = custom_gradients.gradient_by_names(
            op, gradient, transformer.copy_replacing
        )
        gradient_functions.set_gradient(op, gradient_by_names)
    return functions.add_function_of(graph, body, own)
