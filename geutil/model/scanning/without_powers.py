"""Models without what they can do beyond computing, where no output needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from geutil.model.core import EditableModel, M
from geutil.model.programs import Program, node_of, nodes_by_name
from geutil.model.scanning import op_table
from geutil.model.scanning.graph_scan import Body, bodies_of
from geutil.model.strip import side_effects
from geutil.model.strip.report import Stripped, StripReport
from geutil.select.names import LayerNames


def without_powers(model: M) -> M:
    """Return a model without the powers that no output needs; see `Model`."""
    program = model.program()
    kinds = _kinds(program)
    needed = _behind(program, map(node_of, program.outputs.values()))
    waiting = [name for name in program.side_effects if name not in kinds]
    dropped = [name for name in kinds if name not in needed]
    effects = _behind(program, waiting)
    entries = [_entry(name, kinds[name], needed, effects) for name in kinds]
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


def _kinds(program: Program) -> dict[str, str]:
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
            kinds[node.name] = " and ".join(k for k in op_table.POWERS if k in dangers)
    return kinds


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


def _behind(program: Program, ends: Iterable[str]) -> set[str]:
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
