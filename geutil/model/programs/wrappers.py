"""What wrapping a function adds around its results, taken off.

A traced function returns copies of its results that wait for all its effects, and a
SavedModel wraps each signature once more. Left in place, every output would depend on
every effect, and so on every input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from geutil.model.programs.effects import effect_roots
from geutil.model.programs.program import node_of, nodes_by_name

_COPY = re.compile(r"(^|/)Identity(_\d+)?$")


def without_wrappers(
    graph_def: Any, outputs: Mapping[str, str], side_effects: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the ends of a graph without the copies that wrapping adds.

    Args:
        graph_def: a `GraphDef` whose calls are inlined, or not.
        outputs: the tensor of each output.
        side_effects: the nodes that run besides.

    Returns:
        The tensors that are copied, and the nodes with an effect that ran besides or
        that the copies waited for.

    Cost: linear in nodes and edges.
    """
    nodes = nodes_by_name(graph_def)
    readers: dict[str, set[str]] = {}
    for node in graph_def.node:
        for text in node.input:
            # What waits for a copy does not mind that nobody reads it.
            if not text.startswith("^"):
                readers.setdefault(node_of(text), set()).add(node.name)
    waited: dict[str, None] = dict.fromkeys(side_effects)
    copies: set[str] = set()
    tensors = {}
    for name, tensor in outputs.items():
        node = nodes[node_of(tensor)]
        while (
            node.op == "Identity"
            and _COPY.search(node.name)
            and readers.get(node.name, copies) <= copies
        ):
            copies.add(node.name)
            waited |= dict.fromkeys(t[1:] for t in node.input if t.startswith("^"))
            tensor = node.input[0]
            node = nodes[node_of(tensor)]
        tensors[name] = tensor if ":" in tensor else f"{tensor}:0"
    return tensors, effect_roots(graph_def, waited)
