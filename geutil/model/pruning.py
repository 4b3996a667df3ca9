"""Programs without what nothing needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from geutil.graph.functions import functions_of_attributes
from geutil.model.program import Program, node_of, nodes_behind, subgraph


def pruned(program: Program) -> Program:
    """Return a program with the nodes that its ends need, and the captures they read.

    Cost: linear in nodes and edges.
    """
    ends = [*program.inputs.values(), *program.outputs.values()]
    roots = [node_of(end) for end in (*ends, *program.side_effects)]
    stops = [node_of(t) for t in (*program.inputs.values(), *program.captures)]
    nodes = nodes_behind(program.graph_def, roots, stops)
    left = {node.name for node in nodes}
    captures = {t: c for t, c in program.captures.items() if node_of(t) in left}
    return replace(
        program, graph_def=subgraph(program.graph_def, nodes), captures=captures
    )


def drop_uncalled_functions(graph_def: Any) -> None:
    """Take the functions that nothing calls off a `GraphDef`, in place.

    Cost: linear in the nodes, those of functions included.
    """
    library = graph_def.library
    bodies = {f.signature.name: f for f in library.function}
    gradients = {g.function_name: g.gradient_func for g in library.gradient}
    called = dict.fromkeys(_functions_of(graph_def.node))
    waiting = list(called)
    while waiting:
        name = waiting.pop()
        further = [*_functions_of(bodies[name].node_def)] if name in bodies else []
        for other in (*further, gradients.get(name, "")):
            if other and other not in called:
                called[other] = None
                waiting.append(other)
    _keep(library.function, [f for f in library.function if f.signature.name in called])
    _keep(library.gradient, [g for g in library.gradient if g.function_name in called])


def _keep(messages: Any, kept: list[Any]) -> None:
    if len(kept) < len(messages):
        # What is deleted takes along what was read from it.
        kept = [type(m).FromString(m.SerializeToString()) for m in kept]
        del messages[:]
        messages.extend(kept)


def _functions_of(nodes: Any) -> Iterator[str]:
    for node in nodes:
        yield node.op
        yield from functions_of_attributes(node.attr)
