"""Dropping ops with side effects from a program, and all that served only them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geutil.graph.op_types import ENTERS, MERGES
from geutil.model.programs.program import (
    Program,
    node_of,
    nodes_ahead,
    nodes_behind,
    nodes_by_name,
    subgraph,
)

_SWITCHES = frozenset(("RefSwitch", "Switch", "_SwitchN"))


def prune(program: Program, dropped: Iterable[str], kept: Iterable[str]) -> None:
    """Drop nodes, and what outputs and the effects that stay do not need, in place.

    A node is waited for no more, unless an effect that stays happens before it, its
    value is needed anyway, or it decides whether the waiting node runs: the branches
    and loops of version 1 are held together by such edges.

    Args:
        program: the program.
        dropped: the names of nodes whose outputs nobody reads.
        kept: the names of the nodes whose effects stay.

    Cost: linear in nodes and edges.
    """
    graph_def = subgraph(program.graph_def, program.graph_def.node)
    nodes = nodes_by_name(graph_def)
    effects = list(kept)
    stops = [node_of(t) for t in program.captures]
    roots = [*map(node_of, program.outputs.values()), *effects]
    needed = _behind(nodes, roots)
    # Nobody needs what is computed from a dropped node; it can only be waited for.
    emptied = nodes_ahead(graph_def, dropped, data_only=True)
    for name in emptied:
        _as_no_op(nodes[name])
    effective = nodes_ahead(graph_def, effects)
    awaited = effective | nodes_ahead(graph_def, _of_types(graph_def, ENTERS))
    # A conditional ends at its Merge, whose output is there whichever branch ran.
    awaited |= nodes_ahead(graph_def, _of_types(graph_def, _SWITCHES), until=MERGES)
    awaited_or_needed = awaited | needed
    for node in graph_def.node:
        # What an emptied node read, it need not wait for.
        before = awaited if node.name in emptied else awaited_or_needed
        inputs = [t for t in node.input if t[0] != "^" or node_of(t) in before]
        if len(inputs) < len(node.input):
            del node.input[:]
            node.input.extend(inputs)
    program.side_effects = [n for n in program.side_effects if n in effective]
    unread = map(node_of, program.inputs.values())
    ends = [*roots, *program.side_effects, *unread]
    program.graph_def = subgraph(graph_def, nodes_behind(graph_def, ends, stops))


def _as_no_op(node: Any) -> None:
    """Make a node one that only waits, for all that it waited for or read."""
    before = list(dict.fromkeys(node_of(text) for text in node.input))
    node.CopyFrom(type(node)(name=node.name, op="NoOp", device=node.device))
    node.input.extend(f"^{name}" for name in before)


def _behind(nodes: dict[str, Any], names: list[str]) -> set[str]:
    """Return the nodes that the values of nodes depend on."""
    waiting = list(names)
    found = set(waiting)
    while waiting:
        for text in nodes[waiting.pop()].input:
            before = node_of(text)
            if text[0] != "^" and before not in found:
                found.add(before)
                waiting.append(before)
    return found


def _of_types(graph_def: Any, types: frozenset[str]) -> list[str]:
    return [node.name for node in graph_def.node if node.op in types]
