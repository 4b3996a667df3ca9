"""Writing the nodes of an inlined graph."""

from __future__ import annotations

from typing import Any

from geutil.graph.inlining.expansion import NewNode
from geutil.graph.inlining.plan import producer_of
from geutil.graph.inlining.wiring import Wiring

_COLOCATED = b"loc:@"


def canonical(reference: str) -> str:
    """Return how a reference is written here: without the `:0` of a first output."""
    return reference.removesuffix(":0")


def write_node(target: Any, node: NewNode, wiring: Wiring) -> None:
    """Write a node of the result, its inputs followed to the end.

    Args:
        target: an empty `NodeDef`.
        node: the node.
        wiring: what stands for outputs of calls.
    """
    target.CopyFrom(node.definition)
    target.name = node.name
    target.ClearField("input")
    target.input.extend(node.inputs)
    target.device = node.device
    if "_class" in target.attr:
        _rename_colocated(target, node, wiring)
    if node.site.frames and "frame_name" in target.attr:
        frame = target.attr["frame_name"].s.decode("utf-8", "replace")
        target.attr["frame_name"].s = node.site.frames[frame].encode()


def _rename_colocated(target: Any, node: NewNode, wiring: Wiring) -> None:
    colocated = target.attr["_class"].list.s
    renamed = []
    for entry in colocated:
        if entry.startswith(_COLOCATED):
            name = entry.removeprefix(_COLOCATED).decode("utf-8", "replace")
            new = _colocated(name, node, wiring)
            if new:
                renamed.append(_COLOCATED + new.encode())
        else:
            renamed.append(entry)
    del colocated[:]
    colocated.extend(renamed)
    if not renamed:
        del target.attr["_class"]


def _colocated(name: str, node: NewNode, wiring: Wiring) -> str:
    """Return the name in the result of what a node stands by; nothing for a call."""
    site = node.site
    if name in site.plan.calls:
        return ""
    if name in site.plan.args:
        return producer_of(wiring.tensor(site.inputs[site.plan.args[name]]))
    # The graph may name what it likes; a body can only mean what it holds.
    return site.names.get(name, "") if site.name else name
