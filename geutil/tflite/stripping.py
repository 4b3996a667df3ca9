"""Unneeded parts of TFLite files left out: ops, tensors, buffers, names, metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from geutil.errors import TFLiteError
from geutil.tflite import effects, looking
from geutil.tflite.arguments import checked
from geutil.tflite.cutting import drop_unused
from geutil.tflite.parts import Buffer, Code, Contents, LiteGraph, LiteOp
from geutil.tflite.versions import RUNTIME


@checked
def strip(
    file: Contents,
    *,
    unused: bool = True,
    buffers: bool = True,
    names: bool = False,
    metadata: bool | str | Iterable[str] = False,
) -> None:
    """Leave out all that the outputs of the file do not depend on.

    Args:
        unused: whether ops go that no output needs and that change no state,
            tensors and buffers that nothing uses, and subgraphs that nothing calls.
        buffers: whether tensors with the same bytes share a buffer.
        names: whether names of tensors inside and of subgraphs go.
        metadata: whether metadata go, all but the version of the runtime, with the
            description and the files that are packed with them; or the names of
            those that do.

    Raises:
        TFLiteError: there are no such metadata, or others tie ops by their places.

    Cost: linear in ops and tensors; `buffers` reads the weights that have the size
        of others.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> y = m.add("EXP", [x], name="unread")
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> m.strip()
        >>> m.find()
        (<LiteOp NEG -> 'y'>,)
    """
    looking.graph_of(file)
    dropped = _chosen_metadata(file, metadata)
    dead = {graph: _dead_ops(graph) for graph in file.graphs} if unused else {}
    fixed = [n for n in effects.FIXED_BY_METADATA if n in file.metadata]
    if any(dead.values()) and not {*fixed} <= {*dropped}:
        raise TFLiteError(
            f"the metadata '{fixed[0]}' {effects.FIXED_BY_METADATA[fixed[0]]}, and "
            "there are ops that nothing needs",
            remedy=f"leave it out, too: {effects.without(fixed[0])}, or pass "
            "unused=False",
        )
    for name in dropped:
        del file.metadata[name]
    if metadata is True:
        file.description, file.archive = "", None
    for graph, ops in dead.items():
        if ops:
            graph.set_ops(op for op in graph.ops if op not in ops)
    if unused:
        # Subgraphs that nothing calls and no signature names.
        roots = [looking.graph_of(file), *(s.graph for s in file.signatures.values())]
        kept = {*roots, *effects.called_graphs(op for g in roots for op in g.ops)}
        file.graphs = [graph for graph in file.graphs if graph in kept]
        for graph in file.graphs:
            # Places of tensors are in the metadata of an arena, too.
            if not {*fixed} - {*dropped}:
                drop_unused(file, graph, graph.tensors)
        file.kept, file.buffers = {0}, file.buffers[:1]
        # The writer adds those of ops that have another kind or version now.
        used = {id(Code.of(op)) for op in file.ops}
        file.codes = [code for code in file.codes if id(code) in used]
    if buffers:
        share_buffers(file)
    for graph in file.graphs if names else ():
        graph.name = ""
        for t in {*graph.tensors} - {*graph.inputs, *graph.outputs}:
            t.name = ""


def _chosen_metadata(file: Contents, metadata: object) -> list[str]:
    """Return the names of the metadata to leave out."""
    if isinstance(metadata, bool):
        return [n for n in file.metadata if n != RUNTIME] if metadata else []
    if isinstance(metadata, str) or not isinstance(metadata, Iterable):
        metadata = [metadata]
    chosen = [str(name) for name in metadata]
    for name in chosen:
        if name not in file.metadata:
            raise TFLiteError(
                f"there is no metadata '{name}'; there are {[*file.metadata]}"
            )
    return chosen


def _dead_ops(graph: LiteGraph) -> set[LiteOp]:
    """Return the ops that no output needs and that change no state."""
    lasting = [op for op in graph.ops if effects.has_effect(op)]
    read = (*graph.outputs, *(t for op in lasting for t in op.reads))
    return {*graph.ops} - {*lasting, *looking.behind(read)}


def share_buffers(file: Contents) -> None:
    """Let tensors with the same bytes have one buffer."""
    sizes: dict[int, dict[int, Buffer]] = {}
    for t in file.tensors:
        if t.buffer.size:
            sizes.setdefault(t.buffer.size, {})[id(t.buffer)] = t.buffer
    first: dict[int, Buffer] = {}
    for alike in sizes.values():
        if len(alike) > 1:
            known: dict[bytes, Buffer] = {}
            for key, buffer in alike.items():
                data: Any = buffer.data
                digest = hashlib.sha256(data).digest()
                first[key] = known.setdefault(digest, buffer)
    for t in file.tensors:
        t.buffer = first.get(id(t.buffer), t.buffer)
