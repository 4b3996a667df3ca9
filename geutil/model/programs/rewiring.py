"""Rewiring and renaming programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from geutil.model.programs.program import (
    Program,
    canonical,
    node_of,
    nodes_ahead,
    short,
)


def redirect(program: Program, stand_ins: Mapping[str, str]) -> None:
    """Make every reader of some tensors read other ones, in place.

    What waited for the op of such a tensor does not wait any more.

    Args:
        program: the program.
        stand_ins: for the name of each tensor, the one that is read instead.

    Cost: linear in nodes and edges.
    """
    tensors = {canonical(old): canonical(new) for old, new in stand_ins.items()}
    texts = {short(old): short(new) for old, new in tensors.items()}
    nodes = {f"^{node_of(old)}" for old in tensors}
    for node in program.graph_def.node:
        if any(text in texts or text in nodes for text in node.input):
            inputs = [texts.get(t, t) for t in node.input if t not in nodes]
            del node.input[:]
            node.input.extend(inputs)
    program.outputs = {n: tensors.get(t, t) for n, t in program.outputs.items()}
    program.ancestors = [
        replace(a, tensors=_composed(a.tensors, tensors)) for a in program.ancestors
    ]


def forget_shapes_behind(program: Program, tensors: Iterable[str]) -> None:
    """Drop the shapes recorded for what depends on some tensors, in place.

    Cost: linear in nodes and edges.
    """
    starts = {node_of(t) for t in tensors}
    nodes = program.graph_def.node
    readers = [n.name for n in nodes if any(node_of(t) in starts for t in n.input)]
    behind = nodes_ahead(program.graph_def, readers)
    for node in nodes:
        if node.name in behind:
            node.attr.pop("_output_shapes", None)


def rename_placeholders(program: Program, names: Mapping[str, str]) -> None:
    """Rename placeholders and all that refers to them, in place.

    Cost: linear in nodes and edges.
    """

    def renamed(text: str) -> str:
        name = node_of(text)
        new = names.get(name)
        if new is None:
            return text
        start = "^" if text.startswith("^") else ""
        return f"{start}{new}{text.removeprefix(start)[len(name) :]}"

    _rename(program, names, renamed)
    tensors = {f"{old}:0": f"{new}:0" for old, new in names.items()}
    program.ancestors = [
        replace(a, tensors=_composed(a.tensors, tensors)) for a in program.ancestors
    ]


def prefix_nodes(program: Program, prefix: str) -> None:
    """Put a prefix before the names of all nodes and loops' frames, in place."""

    def renamed(text: str) -> str:
        return f"^{prefix}{text[1:]}" if text.startswith("^") else f"{prefix}{text}"

    names = {node.name: f"{prefix}{node.name}" for node in program.graph_def.node}
    for node in program.graph_def.node:
        if "frame_name" in node.attr:
            node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
    _rename(program, names, renamed)
    program.ancestors = [
        replace(
            a,
            prefix=f"{prefix}{a.prefix}",
            tensors={old: f"{prefix}{new}" for old, new in a.tensors.items()},
        )
        for a in program.ancestors
    ]


def _rename(
    program: Program, names: Mapping[str, str], renamed: Callable[[str], str]
) -> None:
    for node in program.graph_def.node:
        node.name = names.get(node.name, node.name)
        inputs = [renamed(text) for text in node.input]
        if inputs != list(node.input):
            del node.input[:]
            node.input.extend(inputs)
        if "_class" in node.attr:
            _rename_groups(node.attr["_class"].list.s, names)
    program.inputs = {n: renamed(t) for n, t in program.inputs.items()}
    program.outputs = {n: renamed(t) for n, t in program.outputs.items()}
    program.captures = {renamed(t): e for t, e in program.captures.items()}
    program.side_effects = [renamed(name) for name in program.side_effects]


def _rename_groups(groups: Any, names: Mapping[str, str]) -> None:
    for i, group in enumerate(groups):
        name = group.removeprefix(b"loc:@").decode(errors="replace")
        if name in names:
            groups[i] = b"loc:@" + names[name].encode()


def _composed(first: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str]:
    return {**then, **{old: then.get(new, new) for old, new in first.items()}}
