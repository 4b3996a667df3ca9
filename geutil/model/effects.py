"""What a call runs besides its outputs: the ops with an effect, and nothing else.

A function names as its side effects all stateful ops, reading a variable among them,
and its results wait for them. Kept as they are, they would hold each part of a model to
the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from geutil.graph.effects import Effects
from geutil.model.program import canonical, node_of, nodes_by_name

_WRAPPER = re.compile(r"(^|/)Identity(_\d+)?$")
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
    effective = set(effects.among(graph_def.node))
    if not effective:
        return []
    nodes = nodes_by_name(graph_def)
    late = _behind(graph_def, effective)
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


def unwrapped(
    graph_def: Any, outputs: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Look behind the copies that wrapping a function adds to its results.

    Args:
        graph_def: the graph.
        outputs: the tensor name of each output.

    Returns:
        The tensors that are copied, and the nodes that the copies waited for.

    Cost: linear in nodes and edges.
    """
    nodes = nodes_by_name(graph_def)
    readers: dict[str, int] = {}
    for node in graph_def.node:
        for text in node.input:
            if not text.startswith("^"):
                readers[node_of(text)] = readers.get(node_of(text), 0) + 1
    waits: dict[str, None] = {}
    results = {}
    for output, tensor in outputs.items():
        allowed = 0
        while True:
            node = nodes.get(node_of(tensor))
            if (
                node is None
                or node.op != "Identity"
                or not _WRAPPER.search(node.name)
                or readers.get(node.name, 0) > allowed
            ):
                break
            tensor = canonical(node.input[0])
            waits.update(dict.fromkeys(map(node_of, node.input[1:])))
            # The copy that was looked behind reads the next one.
            allowed = 1
        results[output] = tensor
    return results, list(waits)


def _behind(graph_def: Any, names: set[str]) -> set[str]:
    """Return the names of the nodes that are, or depend on, some nodes."""
    readers: dict[str, list[str]] = {}
    for node in graph_def.node:
        for text in node.input:
            readers.setdefault(node_of(text), []).append(node.name)
    waiting = list(names)
    found = set(waiting)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader not in found:
                found.add(reader)
                waiting.append(reader)
    return found
