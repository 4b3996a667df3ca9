"""The variables of a graph, and where their values come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.graph.kinds import Graph, Tensor
from geutil.graph.op_types import VARIABLES
from geutil.graph.snapshots import value_behind
from geutil.memory.measuring.job import VariableSpec


def variables_of(
    graph: Graph, graph_def: Any, handles: Mapping[str, Any], session: Any
) -> tuple[tuple[VariableSpec, ...], list[Tensor]]:
    """Return the variables of a part of a graph, and what they start with.

    Args:
        graph: the graph.
        graph_def: the part.
        handles: the eager handle for each op that stands for a captured resource.
        session: a Session that holds the values of the others, or None.

    Returns:
        The variables in the order of their ops, and the tensors of the graph that
        initial values are taken from.

    Raises:
        MeasurementError: a captured resource is no variable, or there is no telling
            what a variable starts with.
    """
    objects = _objects(graph)
    nodes = [node for node in graph_def.node if node.op in VARIABLES]
    others = sorted(set(handles) - {node.name for node in nodes})
    if others:
        raise MeasurementError(
            f"{others} stand for resources that are no variables (tables, iterators or "
            "the like), which only their own process has; measure a callable of an "
            "importable module"
        )
    specs = []
    initials = []
    for node in nodes:
        value = initial = None
        if node.name in handles:
            value = value_behind(handles[node.name])
        elif node.name in objects and session is not None:
            value = session.run(objects[node.name])
        elif node.name in objects:
            # Of Assign and AssignVariableOp alike; `initial_value` is refused in
            # eager code.
            initial = objects[node.name].initializer.inputs[1]
            initials.append(initial)
        else:
            value = _zeros(node)
        specs.append(
            VariableSpec(
                op=node.name,
                key=node.attr["shared_name"].s.decode() or node.name,
                dtype=tf.as_dtype(node.attr["dtype"].type).name,
                value=value,
                initial=None if initial is None else initial.name,
            )
        )
    return tuple(specs), initials


def _objects(graph: Graph) -> dict[str, Any]:
    """Return the variables in the collections of a graph by the name of their op."""
    keys = (
        tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
        tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
    )
    elements = [e for key in keys for e in graph.get_collection(key)]
    return {
        e.op.name: e
        for e in elements
        if isinstance(getattr(e, "op", None), tf.Operation)
    }


def _zeros(node: Any) -> Any:
    shape = tf.TensorShape(node.attr["shape"].shape)
    if not shape.is_fully_defined():
        raise MeasurementError(
            f"variable '{node.name}' has shape {shape} and no initial value; make it "
            "with tf.Variable, so that the graph's collections know it"
        )
    dtype = tf.as_dtype(node.attr["dtype"].type)
    return np.zeros(shape.as_list(), dtype.as_numpy_dtype)
