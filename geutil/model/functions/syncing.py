"""Writing edited bodies back: new definitions, and callers that call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from geutil.graph.function_calls import call_others
from geutil.graph.function_defs import functions_behind
from geutil.graph.function_graphs import seen_variables, stand_in_for
from geutil.graph.function_registry import register, unused_name
from geutil.graph.functions import add_functions
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.model.errors import ModelError
from geutil.model.functions.body_graphs import (
    definition_of,
    materialize_body,
    result_shapes,
)
from geutil.model.functions.callers import NewOutput, Rebuild, replace_caller, same_ends
from geutil.model.functions.families import Family, check_loops, family
from geutil.model.functions.library import Entry, Library
from geutil.model.programs.program import fresh_name


def sync(library: Library) -> None:
    """Write edited bodies back to all that call them.

    Raises:
        ModelError: a body cannot be written; nothing has changed then.

    Cost: constant for each open body that was not edited; else linear in the graph, the
        edited bodies and those that call them.
    """
    if library.is_written or not library.edited():
        return
    with library.writing():
        for entry in library.entries():
            if entry.edited:
                _check(library, entry)
        take_all_captures(library)
        write(library, [entry for entry in library.entries() if entry.edited], {})


def sync_below(library: Library, start: Entry) -> None:
    """Write bodies back if one was edited that a body calls, however indirectly.

    An edit of the body itself may be half done; nothing is behind for its graph.

    Raises:
        ModelError: as `sync`.
    """
    if library.is_written:
        return
    edited = library.edited(besides=start)
    if edited and not set(edited).isdisjoint(library.reachable(start)):
        sync(library)


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


def take_all_captures(library: Library) -> None:
    """Turn what bodies read from outside into arguments, up to the model's graph."""
    # Callees first: what a callee reads from outside, the body around it reads then.
    for entry in reversed(library.entries()):
        if entry.body is not None:
            _take_captures(library, entry)


def _take_captures(library: Library, entry: Entry) -> None:
    """Turn what a body reads from outside into arguments that its callers pass."""
    body = entry.opened()
    captured = body.captured()
    if captured:
        library.holdings.add_variables(seen_variables(body.live))
    for name, inside in captured.items():
        found = family(library, entry)
        check_loops(found)
        outside = body.forget_capture(inside)
        graphs = {caller.op: caller.op.graph for caller in found.callers}
        passed = {op: stand_in_for(g, outside, name) for op, g in graphs.items()}
        for member in found.entries:
            if member is not entry:
                library.open(member)
                add_argument(found, member, name, inside, inside)
                continue
            body.take_input(name, inside)
            if found.loops_around(member):
                body.take_output(fresh_name(set(body.outputs), name), inside)
        write(library, found.entries, with_argument(found, passed))


def add_argument(
    found: Family, member: Entry, name: str, spec: Any, like: Tensor
) -> None:
    """Add an argument to one function of a family."""
    body = member.opened()
    placeholder = body.new_input(fresh_name(set(body.inputs), name), spec, like)
    if found.loops_around(member):
        body.take_output(fresh_name(set(body.outputs), name), placeholder)


def with_argument(
    found: Family, passed: Mapping[Operation, Tensor]
) -> dict[Operation, Rebuild]:
    """Return the new ends of callers that pass one more argument."""
    rebuilds = {}
    for caller in found.callers:
        same, value = same_ends(caller), passed[caller.op]
        added = [NewOutput(value)] if found.returns_argument(caller) else []
        rebuilds[caller.op] = Rebuild([*same.inputs, value], [*same.outputs, *added])
    return rebuilds


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
