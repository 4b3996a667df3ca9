"""Models without what they can do beyond computing, where no output needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from geutil.capabilities import op_table
from geutil.capabilities.graph_scan import Body, bodies_of, node_name
from geutil.graph.function_defs import OF_THE_OLD_BODY, called_names, callees_first
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, node_of, nodes_by_name
from geutil.model.strip import side_effects
from geutil.model.strip.report import Stripped, StripReport
from geutil.model.strip.side_effects import EffectKinds
from geutil.select.names import LayerNames


def without_powers(model: M) -> M:
    """Return a model without the powers that no output needs; see `Model`."""
    program = model.program()
    inside = _prune_bodies(program)
    kinds = _kinds(program)
    needed = _behind(program, map(node_of, program.outputs.values()))
    waiting = [name for name in program.side_effects if name not in kinds]
    dropped = [name for name in kinds if name not in needed]
    effects = _behind(program, waiting)
    entries = [*inside]
    entries += (_entry(name, kinds[name], needed, effects) for name in kinds)
    gone = [name for name in dropped if name not in effects]
    if gone:
        side_effects.prune(program, gone, waiting)
    result = model.derived(program)
    noted = LayerNames(model.graph).noted(entries, "name")
    result.strip_report = StripReport(tuple(noted), _lost(model, result))
    return result


def _lost(before: EditableModel, after: EditableModel) -> tuple[str, ...]:
    left = {op.name for op in after.graph.get_operations()}
    names = (op.name for op in before.graph.get_operations())
    return tuple(name for name in names if name not in left)


def _entry(name: str, kinds: str, needed: set[str], effects: set[str]) -> Stripped:
    if name in needed:
        return Stripped("kept", "power", name, f"can {kinds}, and an output needs it")
    if name in effects:
        reason = f"can {kinds}, and what sets a variable needs it"
        return Stripped("kept", "power", name, reason)
    return Stripped("removed", "power", name, f"can {kinds}, and no output needs it")


def _kinds(program: ModelProgram) -> dict[str, str]:
    """Return what nodes can do, by name: those that call functions what these can."""
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
        dangers = by_node.get(node.name, set()) - op_table.TOLERATED
        if dangers:
            kinds[node.name] = _listed(dangers)
    return kinds


def _prune_bodies(program: ModelProgram) -> list[Stripped]:
    """Take the powers that no result needs out of the bodies of functions, in place.

    The nodes stay as such that only wait, so that what waits for them still can.
    """
    data = program.graph_def.SerializeToString()
    _, bodies = bodies_of(data, (0, len(data)))
    definitions = {f.signature.name: f for f in program.graph_def.library.function}
    effects = EffectKinds(definitions)
    # What functions still can do; those that call themselves, all that they could.
    left = {name: set(_of_body(bodies, name)) for name in definitions}

    def callees(name: str) -> Iterator[str]:
        called = called_names(definitions[name].node_def)
        return (callee for callee in called if callee in definitions)

    entries = []
    for name in callees_first(definitions, callees):
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


def _kinds_in(body: Body, left: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return what the nodes of a body can do, given what functions still can."""
    kinds: dict[str, set[str]] = {}
    for found in body.found:
        own = left.get(found.node.op, {found.kind})
        kinds.setdefault(found.node.name, set()).update(own)
    for node, names in body.calls:
        inside = (left.get(name, set()) for name in names)
        kinds.setdefault(node.name, set()).update(*inside)
    dangers = {name: found - op_table.TOLERATED for name, found in kinds.items()}
    return {name: found for name, found in dangers.items() if found}


def _unneeded(
    definition: Any, kinds: Mapping[str, set[str]], effects: EffectKinds
) -> set[str]:
    """Return the nodes with powers that neither results nor other effects need.

    What writes a variable besides is one of these effects.
    """
    nodes = {node.name: node for node in definition.node_def}
    waiting = [node_name(tensor) for tensor in definition.ret.values()]
    for name, node in nodes.items():
        found = effects.of(node)
        if "write" in found or (found and name not in kinds):
            waiting.append(name)
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in nodes and name not in needed:
            needed.add(name)
            waiting += (node_name(t) for t in nodes[name].input if t[0] != "^")
    return {name for name in kinds if name not in needed}


def _empty(definition: Any, dropped: set[str]) -> None:
    """Let nodes only wait, and those that are computed from them."""
    emptied = set(dropped)
    nodes = {node.name: node for node in definition.node_def}
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for tensor in node.input:
            if tensor[0] != "^":
                readers.setdefault(node_name(tensor), []).append(name)
    waiting = list(dropped)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader not in emptied:
                emptied.add(reader)
                waiting.append(reader)
    for name in emptied:
        node = nodes[name]
        before = dict.fromkeys(map(node_name, node.input))
        node.CopyFrom(type(node)(name=name, op="NoOp", device=node.device))
        # Arguments cannot be waited for.
        node.input.extend(f"^{other}" for other in before if other in nodes)
    for attribute in OF_THE_OLD_BODY:
        definition.attr.pop(attribute, None)


def _listed(kinds: set[str]) -> str:
    return " and ".join(kind for kind in op_table.POWERS if kind in kinds)


def _of_body(functions: Mapping[str, Body], name: str) -> Iterator[str]:
    """Yield what a function and those that it calls can do."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        body = functions.get(waiting.pop())
        if body is not None and body.place not in seen:
            seen.add(body.place)
            yield from (found.kind for found in body.found)
            waiting += [callee for _, names in body.calls for callee in names]


def _behind(program: ModelProgram, ends: Iterable[str]) -> set[str]:
    """Return the names of the nodes whose values some nodes need, with these."""
    nodes = nodes_by_name(program.graph_def)
    seen: set[str] = set()
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            inputs = (t for t in nodes[name].input if not t.startswith("^"))
            waiting += [node_of(tensor) for tensor in inputs]
    return seen
