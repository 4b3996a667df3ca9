"""Models without their capabilities beyond computing, where no output needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from geutil.capabilities import capability_kinds
from geutil.capabilities.capability_kinds import ScannedBody, bodies_of
from geutil.graph.function_calls import OF_THE_OLD_BODY, called_names
from geutil.graph.walks import closure, data_inputs, node_name, topological_order
from geutil.model import training_parts
from geutil.model.core import EditableModel, M
from geutil.model.inference_form import Stripped, StripReport
from geutil.model.programs import ModelProgram, nodes_by_name, values_behind
from geutil.model.training_parts import EffectKinds
from geutil.select.selections import LayerNames


def without_powers(model: M) -> M:
    """Return a model without the capabilities that no output needs; see `Model`."""
    program = model.program()
    inside = _prune_bodies(program)
    kinds = _kinds(program)
    nodes = nodes_by_name(program.graph_def)
    needed = values_behind(nodes, map(node_name, program.outputs.values()))
    waiting = [name for name in program.side_effects if name not in kinds]
    dropped = [name for name in kinds if name not in needed]
    effects = values_behind(nodes, waiting)
    entries = [*inside]
    entries += (_entry(name, kinds[name], needed, effects) for name in kinds)
    # An effect that one of the others needs has to stay.
    gone = [name for name in dropped if name not in effects]
    if gone:
        training_parts.prune(program, gone, waiting)
    result = model.derived(program)
    noted = LayerNames(model.graph).noted(entries, "name")
    result.strip_report = StripReport(tuple(noted), _lost(model, result))
    return result


def _lost(before: EditableModel, after: EditableModel) -> tuple[str, ...]:
    left = {op.name for op in after.graph.get_operations()}
    names = (op.name for op in before.graph.get_operations())
    return tuple(name for name in names if name not in left)


def _entry(
    name: str, kinds: str, needed: Collection[str], effects: Collection[str]
) -> Stripped:
    if name in needed:
        return Stripped("kept", "power", name, f"can {kinds}, and an output needs it")
    if name in effects:
        reason = f"can {kinds}, and what sets a variable needs it"
        return Stripped("kept", "power", name, reason)
    return Stripped("removed", "power", name, f"can {kinds}, and no output needs it")


def _kinds(program: ModelProgram) -> dict[str, str]:
    """Return the capabilities of nodes by name, those of called functions included."""
    data = program.graph_def.SerializeToString()
    main, functions = bodies_of(data, (0, len(data)))
    kinds: dict[str, str] = {}
    by_node: dict[str, set[str]] = {}
    for found in main.found:
        own = _of_body(functions, found.node.op) if found.node.op in functions else ()
        by_node.setdefault(found.node.name, set()).update(own or (found.kind,))
    for node, names in main.calls:
        called = {kind for name in names for kind in _of_body(functions, name)}
        by_node.setdefault(node.name, set()).update(called)
    for node in program.graph_def.node:
        dangers = by_node.get(node.name, set()) - capability_kinds.TOLERATED
        if dangers:
            kinds[node.name] = _listed(dangers)
    return kinds


def _prune_bodies(program: ModelProgram) -> list[Stripped]:
    """Remove the capabilities that no result needs from bodies of functions, in place.

    The nodes stay as such that only wait, so that ops that wait for them still can.
    """
    data = program.graph_def.SerializeToString()
    _, bodies = bodies_of(data, (0, len(data)))
    definitions = {f.signature.name: f for f in program.graph_def.library.function}
    effects = EffectKinds(definitions)
    # The capabilities left in functions; recursive ones keep all that they had.
    left = {name: set(_of_body(bodies, name)) for name in definitions}

    def callees(name: str) -> Iterator[str]:
        called = called_names(definitions[name].node_def)
        return (callee for callee in called if callee in definitions)

    entries = []
    for name in topological_order(definitions, callees):
        kinds = _kinds_in(bodies[name], left)
        dropped = _unneeded(definitions[name], kinds, effects)
        if dropped:
            _empty(definitions[name], dropped)
        for node in kinds:
            if node in dropped:
                listed = _listed(kinds[node])
                reason = f"can {listed}, and no result of its function needs it"
                entries.append(Stripped("removed", "power", node, reason))
        left[name] = set().union(*(kinds[n] for n in kinds if n not in dropped))
    return entries


def _kinds_in(body: ScannedBody, left: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the capabilities of a body's nodes, given those left in functions."""
    kinds: dict[str, set[str]] = {}
    for found in body.found:
        own = left.get(found.node.op, {found.kind})
        kinds.setdefault(found.node.name, set()).update(own)
    for node, names in body.calls:
        inside = (left.get(name, set()) for name in names)
        kinds.setdefault(node.name, set()).update(*inside)
    dangers = {
        name: found - capability_kinds.TOLERATED for name, found in kinds.items()
    }
    return {name: found for name, found in dangers.items() if found}


def _unneeded(
    definition: Any, kinds: Mapping[str, set[str]], effects: EffectKinds
) -> set[str]:
    """Return the nodes with capabilities that neither results nor other effects need.

    A write of a variable is one of these effects.
    """
    nodes = {node.name: node for node in definition.node_def}
    ends = [node_name(tensor) for tensor in definition.ret.values()]
    for name, node in nodes.items():
        found = effects.of(node)
        if "write" in found or (found and name not in kinds):
            ends.append(name)
    needed = values_behind(nodes, ends)
    return {name for name in kinds if name not in needed}


def _empty(definition: Any, dropped: set[str]) -> None:
    """Let nodes only wait, and those that are computed from them."""
    nodes = {node.name: node for node in definition.node_def}
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for tensor in data_inputs(node.input):
            readers.setdefault(node_name(tensor), []).append(name)
    for name in closure(dropped, lambda name: readers.get(name, ())):
        training_parts.as_no_op(nodes[name], nodes)
    for attribute in OF_THE_OLD_BODY:
        definition.attr.pop(attribute, None)


def _listed(kinds: set[str]) -> str:
    return " and ".join(kind for kind in capability_kinds.POWERS if kind in kinds)


def _of_body(functions: Mapping[str, ScannedBody], name: str) -> Iterator[str]:
    """Yield the capabilities of a function and of its callees."""

    def callees(called: str) -> list[str]:
        body = functions.get(called)
        return [] if body is None else [c for _, names in body.calls for c in names]

    for called in closure([name], callees):
        if called in functions:
            yield from (found.kind for found in functions[called].found)
