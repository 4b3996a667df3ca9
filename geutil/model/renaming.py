"""New names for nodes, wherever a graph names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geutil.model.program import node_of


def renamed(tensor: str, names: Mapping[str, str]) -> str:
    """Return the name of a tensor after its node got a new one."""
    node, colon, index = tensor.partition(":")
    return f"{names.get(node, node)}{colon}{index}"


def rename_references(nodes: Any, names: Mapping[str, str]) -> None:
    """Rename nodes where other nodes name them: in inputs and in colocation groups.

    Cost: linear in nodes and edges.
    """
    if all(old == new for old, new in names.items()):
        return
    for node in nodes:
        for index, text in enumerate(node.input):
            before = node_of(text)
            if before in names:
                control = "^" if text.startswith("^") else ""
                node.input[index] = control + renamed(text.removeprefix("^"), names)
        if "_class" in node.attr:
            groups = node.attr["_class"].list.s
            for index, group in enumerate(groups):
                place = group.decode().removeprefix("loc:@")
                groups[index] = f"loc:@{names.get(place, place)}".encode()
