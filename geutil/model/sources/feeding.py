"""Inputs of graphs that are no placeholders.

Version 1 feeds any tensor: a `PlaceholderWithDefault`, or one in the middle of a graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.programs.program import (
    Program,
    canonical,
    fresh_name,
    legal_name,
    node_of,
    nodes_by_name,
)
from geutil.model.programs.rewiring import redirect


def with_placeholders(program: Program, what: str) -> Program:
    """Return a program in which each input is a placeholder.

    Args:
        program: the program, which is not changed.
        what: its source in words.

    Raises:
        ModelError: an input is no tensor of the graph.

    Cost: linear in nodes and edges; an import of the graph, where a tensor in its
    middle is an input.
    """
    nodes = nodes_by_name(program.graph_def)
    fed = {
        name: canonical(t)
        for name, t in program.inputs.items()
        if nodes[node_of(t)].op != "Placeholder"
    }
    if not fed:
        return program
    graph_def = type(program.graph_def)()
    graph_def.CopyFrom(program.graph_def)
    program = replace(program, graph_def=graph_def)
    taken = set(nodes)
    stand_ins = {}
    for name, spec in _specs(graph_def, fed, what).items():
        node = graph_def.node.add(op="Placeholder")
        node.name = fresh_name(taken, legal_name(name))
        node.attr["dtype"].type = spec.dtype.base_dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
        taken.add(node.name)
        stand_ins[fed[name]] = f"{node.name}:0"
    redirect(program, stand_ins)
    program.inputs = {
        name: stand_ins.get(canonical(t), t) for name, t in program.inputs.items()
    }
    return program


def _specs(graph_def: Any, tensors: dict[str, str], what: str) -> dict[str, Any]:
    """Return what has the dtype and shape of each tensor."""
    with tf.Graph().as_default():
        try:
            elements = tf.import_graph_def(
                graph_def, name="", return_elements=list(tensors.values())
            )
        except Exception as error:
            # The importer raises whatever the C++ status and its own checks make of it.
            raise ModelError(
                f"the inputs {list(tensors)} of {what} cannot be fed: {error}"
            ) from error
    return dict(zip(tensors, elements, strict=True))
