"""Writing edited bodies back: new definitions, and callers that call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from geutil.graph.function_calls import call_others
from geutil.graph.function_defs import functions_behind
from geutil.graph.function_registry import register, unused_name
from geutil.graph.functions import add_functions
from geutil.graph.kinds import Graph, Operation
from geutil.model.errors import ModelError
from geutil.model.functions.body_graphs import (
    definition_of,
    materialize_body,
    result_shapes,
)
from geutil.model.functions.callers import Rebuild, replace_caller, same_ends

if TYPE_CHECKING:
    from geutil.model.functions.library import Entry, Library


def sync(library: Library) -> None:
    """Write the edited bodies of a library back; see `Library.sync`."""
    from geutil.model.functions.body_inputs import take_all_captures

    for entry in library.entries():
        if entry.edited:
            _check(library, entry)
    take_all_captures(library)
    write(library, [entry for entry in library.entries() if entry.edited], {})


def _check(library: Library, entry: Entry) -> None:
    """Raise unless the body is a function that its callers can call as before."""
    draft = draft_of(entry, unused_name(entry.name))
    parts = materialize_body(
        draft, library.definitions_for(entry), library.handles(entry)
    )
    shapes = zip(parts.sinks, entry.shapes, result_shapes(parts), strict=True)
    for name, before, after in shapes:
        if not before.is_compatible_with(after):
            raise ModelError(
                f"output '{name}' of function '{entry.key}' was of shape {before} and "
                f"is {after} now; what reads it in the callers was made for the "
                "former: reshape it in the body, or give the callers another output "
                "with add_output"
            )


def draft_of(entry: Entry, name: str) -> Any:
    """Return the definition of an open body as it is now, under another name."""
    body = entry.opened()
    return definition_of(
        body.live,
        name,
        {**body.inputs, **body.captured()},
        body.outputs,
        body.side_effects,
        entry.definition,
    )


def write(
    library: Library, changed: Iterable[Entry], rebuilds: Mapping[Operation, Rebuild]
) -> dict[Operation, Operation]:
    """Define changed functions anew, and with them all that call them.

    Args:
        library: the functions.
        changed: those whose bodies changed; they are open.
        rebuilds: the new inputs and outputs of callers for which these change.

    Returns:
        The new op for each that was replaced.
    """
    order = _with_callers(library, changed)
    if not order:
        return {}
    for entry in reversed(order):
        library.open(entry)
    names: dict[str, str] = {}
    sources: dict[str, Graph] = {}
    replaced: dict[Operation, Operation] = {}
    for entry in order:
        graph = entry.opened().live
        replaced |= _update(library, graph, names, sources, rebuilds)
        old = entry.name
        definition = draft_of(entry, unused_name(old))
        names[old] = definition.signature.name
        sources[definition.signature.name] = graph
        register(definition)
        library.redefine(entry, definition)
        entry.written = entry.opened().state()
        entry.shapes = [t.shape for t in entry.opened().outputs.values()]
    replaced |= _update(library, library.root, names, sources, rebuilds)
    return replaced


def _with_callers(library: Library, changed: Iterable[Entry]) -> list[Entry]:
    """Return functions and those that call them, however indirectly, callees first.

    No function calls itself: TensorFlow cannot import such a graph.
    """
    affected = {entry.name for entry in changed}
    order = []
    for entry in reversed(library.entries()):
        if entry.name in affected or not affected.isdisjoint(library.called_in(entry)):
            affected.add(entry.name)
            order.append(entry)
    return order


def _update(
    library: Library,
    graph: Graph,
    names: Mapping[str, str],
    sources: Mapping[str, Graph],
    rebuilds: Mapping[Operation, Rebuild],
) -> dict[Operation, Operation]:
    """Make the ops of one graph call the new functions."""
    replaced = {}
    for caller in library.callers_in(graph):
        called = [names[name] for name in caller.names if name in names]
        if not called:
            continue
        for name in called:
            definition = library.entry(name).definition
            behind = functions_behind(sources[name], definition)
            add_functions(graph, [*behind, definition])
        if caller.op not in rebuilds and caller.callees[0].attribute:
            call_others(caller, names)
            continue
        rebuild = rebuilds.get(caller.op) or same_ends(caller)
        replaced[caller.op] = replace_caller(caller, names, rebuild)
        library.retired.add(caller.op)
    return replaced
