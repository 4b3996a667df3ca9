"""Names and name scopes."""

from __future__ import annotations

from collections.abc import Iterable

from geutil.graph.types import Graph


def scope_finalize(scope: str) -> str:
    """Return `scope` with a slash at its end; the empty scope stays empty."""
    return f"{scope}/" if scope and not scope.endswith("/") else scope


def is_in_scope(name: str, scope: str | None) -> bool:
    """Tell whether `name` is that of a name scope, or of something in it.

    Args:
        name: the name of an op or of a scope.
        scope: the scope, with or without a slash at its end; the empty one and None
            hold everything.
    """
    return f"{name}/".startswith(scope_finalize(scope or ""))


def scope_dirname(name: str) -> str:
    """Return the scope part of `name`, slash included."""
    return name[: name.rfind("/") + 1]


def scope_basename(name: str) -> str:
    """Return what follows the last slash of `name`."""
    return name[name.rfind("/") + 1 :]


def absolute_unique_names(graph: Graph, names: Iterable[str]) -> list[str]:
    """Return each name as `absolute_unique_name` does, in one go."""
    scope, graph._name_stack = graph._name_stack, ""
    try:
        return [graph.unique_name(name) for name in names]
    finally:
        graph._name_stack = scope


def absolute_unique_name(graph: Graph, name: str) -> str:
    """Return `name`, or `name_1` and so on where it is taken, and reserve it.

    The current name scope is left out of account, unlike `tf.Graph.unique_name`.
    """
    return absolute_unique_names(graph, [name])[0]


def scopes_in_use(graph: Graph) -> frozenset[str]:
    """Return every name scope that an op is in, with a slash at its end.

    Cost: linear in the ops.
    """
    scopes: set[str] = set()
    for scope in {scope_dirname(op.name) for op in graph.get_operations()}:
        while scope and scope not in scopes:
            scopes.add(scope)
            scope = scope_dirname(scope[:-1])
    return frozenset(scopes)


def unused_name(graph: Graph, name: str) -> str:
    """Return `name`, or `name_1` and so on where it is taken, without reserving it."""
    scope, graph._name_stack = graph._name_stack, ""
    try:
        return str(graph.unique_name(name, mark_as_used=False))
    finally:
        graph._name_stack = scope
