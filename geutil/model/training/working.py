"""The copy of a model's graph that stripping works on."""

from __future__ import annotations

from typing import Any

from geutil.graph.function_graphs import bindings
from geutil.graph.kinds import Operation
from geutil.model.programs.materializing import Parts
from geutil.model.programs.program import Program
from geutil.model.sources.functions import program_of_graph
from geutil.select.walks import get_backward_walk_ops


def program_of_parts(parts: Parts) -> Program:
    """Return the program of a graph and its ends, as they are now."""
    program = program_of_graph(
        parts.graph,
        parts.inputs,
        {name: sink.inputs[0] for name, sink in parts.sinks.items()},
        bindings(parts.graph),
    )
    program.side_effects = [op.name for op in parts.side_effects.control_inputs]
    return program


def keep_of(parts: Parts) -> list[Any]:
    """Return the ends of a graph, which rewriting must leave."""
    return [*parts.inputs.values(), *parts.sinks.values(), parts.side_effects]


def live_ops(parts: Parts) -> frozenset[Operation]:
    """Return the ops that the values of the outputs are computed by."""
    return frozenset(get_backward_walk_ops(list(parts.sinks.values())))
