"""A graph or a function body as nodes to walk over, producers first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.graph.bodies import flat_body
from geutil.graph.op_types import NEXT_ITERATIONS
from geutil.model.programs.program import canonical, node_of


@dataclass(frozen=True)
class Entry:
    """A node of a scope.

    Attributes:
        node: its definition.
        inputs: the tensors that it reads, as `node:k`, control inputs left out.
        written: the same as the scope writes them: `node`, or `node:output:k` inside a
            function.
    """

    node: Any
    inputs: tuple[str, ...]
    written: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """A graph, or the body of a function.

    Attributes:
        entries: its nodes, producers first; loops of version 1 are cut where they go
            back.
        args: the names of a function's arguments.
        results: what a function returns, as `node:k`.
    """

    entries: tuple[Entry, ...]
    args: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    def readers(self) -> dict[str, list[tuple[Entry, int]]]:
        """Return (entry, index) of each reader of each tensor."""
        found: dict[str, list[tuple[Entry, int]]] = {}
        for entry in self.entries:
            for index, name in enumerate(entry.inputs):
                found.setdefault(name, []).append((entry, index))
        return found


def scope_of_graph(graph_def: Any) -> Scope:
    """Return the scope of the nodes of a `GraphDef`."""
    return Scope(_ordered(graph_def.node, [n.input for n in graph_def.node]))


def scope_of_function(
    function: Any, library: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Scope:
    """Return the scope of a function's body.

    Raises:
        TransformError: the function is damaged, or takes lists of tensors.
    """
    body = flat_body(function, library, attributes)
    nodes = [n.definition for n in body.nodes]
    return Scope(
        _ordered(nodes, [n.inputs for n in body.nodes]),
        tuple(f"{arg.name}:0" for arg in body.args),
        tuple(canonical(result.tensor) for result in body.results),
    )


def _ordered(
    nodes: Sequence[Any], inputs: Sequence[Sequence[str]]
) -> tuple[Entry, ...]:
    """Return entries with producers first, else in the order given."""
    index = {node.name: i for i, node in enumerate(nodes)}
    waits = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, names in enumerate(inputs):
        for name in names:
            producer = index.get(node_of(name))
            if producer is not None and nodes[producer].op not in NEXT_ITERATIONS:
                waits[i] += 1
                readers[producer].append(i)
    ready = [i for i, count in enumerate(waits) if not count]
    for i in ready:
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return tuple(_entry(nodes[i], inputs[i]) for i in ready)


def _entry(node: Any, inputs: Sequence[str]) -> Entry:
    data = tuple(canonical(name) for name in inputs if not name.startswith("^"))
    written = tuple(name for name in node.input if not name.startswith("^"))
    return Entry(node, data, written)


def constant_value(node: Any) -> Any:
    """Return the value of a Const node."""
    return tf.make_ndarray(node.attr["value"].tensor)
