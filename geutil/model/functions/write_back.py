"""Edited bodies written back: new definitions, and callers that call them.

The functions of a loop have the same arguments, and so have the branches of a
conditional. They change together: a *family*. In a loop an argument is a variable of
the loop, so the body also returns it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from geutil.bodies.function_bodies import (
    NewFunctions,
    NewOutput,
    Rebuild,
    replace_caller,
    same_ends,
)
from geutil.errors import ModelError
from geutil.graph import function_defs, functions
from geutil.graph.function_calls import Caller, call_others
from geutil.graph.types import Graph, Operation, Tensor
from geutil.model.functions.library import (
    Entry,
    FunctionLibrary,
    definition_of,
    materialize_body,
    result_shapes,
)
from geutil.model.programs import fresh_name


@dataclass(frozen=True)
class Family:
    """Functions that have their arguments in common, and the ops that call them."""

    entries: list[Entry]
    callers: list[Caller]

    def loops_around(self, entry: Entry) -> list[Caller]:
        """Return the loops whose body the function is."""
        return [c for c in self.callers if c.is_loop and body_of(c) == entry.name]

    def returns_argument(self, caller: Caller) -> bool:
        """Tell whether a caller returns a variable of a loop for each argument."""
        names = {e.name for e in self.entries if self.loops_around(e)}
        return caller.is_loop or not names.isdisjoint(caller.names)


def body_of(loop: Caller) -> str:
    """Return the name of the body of a loop."""
    return next(c.name for c in loop.callees if c.attribute == "body")


def family(library: FunctionLibrary, entry: Entry) -> Family:
    """Return the functions whose arguments change when those of one do."""
    entries = [entry]
    while True:
        callers = library.callers_of(entries)
        names = dict.fromkeys(e.name for e in entries)
        for caller in callers:
            if caller.is_loop or caller.is_branching:
                names |= dict.fromkeys(caller.names)
            elif not caller.is_call:
                raise ModelError(
                    f"'{caller.op.name}' ({caller.op.type}) calls '{entry.key}', and "
                    "geutil does not know how its arguments go with its inputs; "
                    "replace that op first"
                )
        if len(names) == len(entries):
            return Family(entries, callers)
        entries = [library.entry(name) for name in names]


def check_loops(entry_family: Family) -> None:
    """Refuse the body of a loop that is something else as well, with other results."""
    for entry in entry_family.entries:
        if not entry_family.loops_around(entry):
            continue
        for caller in entry_family.callers:
            cond = caller.is_loop and body_of(caller) != entry.name
            if entry.name in caller.names and (caller.is_branching or cond):
                raise ModelError(
                    f"function '{entry.key}' is the body of a loop, and "
                    f"'{caller.op.name}' ({caller.op.type}) calls it too; such a "
                    "function keeps its arguments"
                )


def sync(library: FunctionLibrary) -> None:
    """Write edited bodies back to all that call them."""
    if library.is_written or not library.edited():
        return
    with library.writing():
        for entry in library.entries():
            if entry.edited:
                _check(library, entry)
        take_all_captures(library)
        write(library, [entry for entry in library.entries() if entry.edited], {})


def sync_below(library: FunctionLibrary, start: Entry) -> None:
    """Write bodies back if one was edited that a body calls, however indirectly."""
    # An edit of the body itself may be half done; nothing is behind for its graph.
    if library.is_written:
        return
    edited = library.edited(besides=start)
    if edited and not set(edited).isdisjoint(library.reachable(start)):
        sync(library)


def _check(library: FunctionLibrary, entry: Entry) -> None:
    """Raise unless the body is a function that its callers can call as before."""
    draft = draft_of(entry, function_defs.unused_name(entry.name))
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
    library: FunctionLibrary,
    changed: Iterable[Entry],
    rebuilds: Mapping[Operation, Rebuild],
) -> dict[Operation, Operation]:
    """Define changed functions anew, and with them all that call them."""
    order = _with_callers(library, changed)
    if not order:
        return {}
    for entry in reversed(order):
        library.open(entry)
    new = NewFunctions()
    replaced: dict[Operation, Operation] = {}
    for entry in order:
        graph = entry.opened().live
        replaced |= _update(library, graph, new, rebuilds)
        draft = functools.partial(draft_of, entry)
        library.redefine(entry, new.define(entry.name, graph, draft))
        entry.written = entry.opened().state()
        entry.shapes = [t.shape for t in entry.opened().outputs.values()]
    replaced |= _update(library, library.root, new, rebuilds)
    return replaced


def take_all_captures(library: FunctionLibrary) -> None:
    """Turn captures of bodies into arguments, up to the model's graph."""
    # Callees first: what a callee reads from outside, the body around it reads then.
    for entry in reversed(library.entries()):
        if entry.body is not None:
            _take_captures(library, entry)


def _take_captures(library: FunctionLibrary, entry: Entry) -> None:
    """Turn the captures of a body into arguments that its callers pass."""
    body = entry.opened()
    captured = body.captured()
    if captured:
        library.holdings.add_variables(functions.seen_variables(body.live))
    for name, inside in captured.items():
        entry_family = family(library, entry)
        check_loops(entry_family)
        outside = body.forget_capture(inside)
        graphs = {caller.op: caller.op.graph for caller in entry_family.callers}
        passed = {
            op: functions.stand_in_for(g, outside, name) for op, g in graphs.items()
        }
        for member in entry_family.entries:
            if member is not entry:
                library.open(member)
                add_argument(entry_family, member, name, inside, inside)
                continue
            body.take_input(name, inside)
            if entry_family.loops_around(member):
                body.take_output(fresh_name(set(body.outputs), name), inside)
        write(library, entry_family.entries, with_argument(entry_family, passed))


def add_argument(
    entry_family: Family, member: Entry, name: str, spec: Any, like: Tensor
) -> None:
    """Add an argument to one function of a family."""
    body = member.opened()
    placeholder = body.new_input(fresh_name(set(body.inputs), name), spec, like)
    if entry_family.loops_around(member):
        body.take_output(fresh_name(set(body.outputs), name), placeholder)


def with_argument(
    entry_family: Family, passed: Mapping[Operation, Tensor]
) -> dict[Operation, Rebuild]:
    """Return the new ends of callers that pass one more argument."""
    rebuilds = {}
    for caller in entry_family.callers:
        same, value = same_ends(caller), passed[caller.op]
        added = [NewOutput(value)] if entry_family.returns_argument(caller) else []
        rebuilds[caller.op] = Rebuild([*same.inputs, value], [*same.outputs, *added])
    return rebuilds


def _with_callers(library: FunctionLibrary, changed: Iterable[Entry]) -> list[Entry]:
    """Return functions and those that call them, however indirectly, callees first."""
    # No function calls itself: TensorFlow cannot import such a graph.
    affected = {entry.name for entry in changed}
    order = []
    for entry in reversed(library.entries()):
        if entry.name in affected or not affected.isdisjoint(library.called_in(entry)):
            affected.add(entry.name)
            order.append(entry)
    return order


def _update(
    library: FunctionLibrary,
    graph: Graph,
    new: NewFunctions,
    rebuilds: Mapping[Operation, Rebuild],
) -> dict[Operation, Operation]:
    """Make the ops of one graph call the new functions."""
    replaced = {}
    for caller in library.callers_in(graph):
        if not new.hold(graph, caller):
            continue
        if caller.op not in rebuilds and caller.callees[0].attribute:
            call_others(caller, new.names)
            continue
        rebuild = rebuilds.get(caller.op) or same_ends(caller)
        replaced[caller.op] = replace_caller(caller, new.names, rebuild)
        library.retired.add(caller.op)
    return replaced
