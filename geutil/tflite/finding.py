"""Tensors of a subgraph found by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from geutil.errors import TFLiteError
from geutil.tflite.parts import Contents, LiteGraph, LiteTensor


def graph_of(file: Contents, graph: LiteGraph | None) -> LiteGraph:
    """Return a subgraph of a file, the main one if None.

    Raises:
        TFLiteError: it is not in this file, or the file has none.
    """
    if graph is None and file.graphs:
        return file.graphs[0]
    if graph is None or graph not in file.graphs:
        raise TFLiteError(f"the file has no subgraph {graph!r}")
    return graph


def tensor_of(graph: LiteGraph, named: LiteTensor | str) -> LiteTensor:
    """Return a tensor of a subgraph: itself, or the one of a name.

    Raises:
        TFLiteError: there is none, or several have the name.
    """
    return _found(named, ((t.name, t) for t in graph.tensors), graph, "tensor")


def input_of(file: Contents, graph: LiteGraph, named: LiteTensor | str) -> LiteTensor:
    """Return an input of a subgraph, which signatures can have a name for."""
    return _end(file, graph, named, "inputs")


def output_of(file: Contents, graph: LiteGraph, named: LiteTensor | str) -> LiteTensor:
    """Return an output of a subgraph, which signatures can have a name for."""
    return _end(file, graph, named, "outputs")


def _end(
    file: Contents, graph: LiteGraph, named: LiteTensor | str, field: str
) -> LiteTensor:
    own = [(t.name, t) for t in getattr(graph, field)]
    named_so = [
        pair
        for signature in file.signatures.values()
        if signature.graph is graph
        for pair in getattr(signature, field).items()
    ]
    return _found(named, dict.fromkeys([*own, *named_so]), graph, field[:-1])


def _found(
    named: LiteTensor | str,
    known: Iterable[tuple[str, LiteTensor]],
    graph: LiteGraph,
    what: str,
) -> LiteTensor:
    pairs = [*known]
    found = {t: None for name, t in pairs if named is t or named == name}
    if len(found) == 1:
        return next(iter(found))
    said = named.name if isinstance(named, LiteTensor) else named
    if found:
        raise TFLiteError(
            f"subgraph '{graph.name}' has {len(found)} {what}s of the name '{said}'; "
            "pass the tensor itself"
        )
    names = [name for name, _ in pairs]
    near = difflib.get_close_matches(said, names, 3, 0.5) or names[:5]
    raise TFLiteError(
        f"subgraph '{graph.name}' has no {what} '{said}'; near names are "
        f"{', '.join(map(repr, near)) or 'none'}"
    )
