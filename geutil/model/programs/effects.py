"""What a call runs besides its outputs: the ops with an effect, and nothing else.

A function names as its side effects all stateful ops, reading a variable among them,
and its results wait for them. Kept as they are, they would hold each part of a model to
the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geutil.graph.effects import Effects
from geutil.model.programs.program import node_of, nodes_ahead, nodes_by_name

# What is behind them runs in a frame of its own, or perhaps not at all.
_CONTROL_FLOW = frozenset(
    ("Exit", "Merge", "RefExit", "RefMerge", "RefSwitch", "Switch")
)


def effect_roots(graph_def: Any, roots: Iterable[str]) -> list[str]:
    """Return the nodes that must run for all effects behind some nodes to happen.

    Args:
        graph_def: the graph.
        roots: names of nodes.

    Returns:
        Names of nodes, the first ones with an effect that are met going back.

    Cost: linear in nodes and edges.
    """
    effects = Effects({f.signature.name: f for f in graph_def.library.function})
    effective = {node.name for node in graph_def.node if effects.of(node)}
    if not effective:
        return []
    nodes = nodes_by_name(graph_def)
    late = nodes_ahead(graph_def, effective)
    waiting = [name for name in dict.fromkeys(roots) if name in late]
    met = set(waiting)
    found = set()
    while waiting:
        node = nodes[waiting.pop()]
        if node.name in effective or node.op in _CONTROL_FLOW:
            found.add(node.name)
            continue
        for name in map(node_of, node.input):
            if name in late and name not in met:
                met.add(name)
                waiting.append(name)
    return [node.name for node in graph_def.node if node.name in found]
