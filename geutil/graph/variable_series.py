"""Many variables of a version 1 graph, made in one go.

One made by TensorFlow takes some 2 ms. Of each shape one is, and serves as a pattern:
the ops of the others are copies of its nodes, imported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph._tf import ResourceVariable
from geutil.graph.importing import import_ops, neutral, new_graph_def
from geutil.graph.kinds import Graph, is_func_graph
from geutil.graph.names import absolute_unique_name
from geutil.graph.outside_variables import variable_outside
from geutil.graph.state import state_of
from geutil.graph.surroundings import count_ops, ops_since

_NAMES = ("shared_name", "debug_name")
_FIELDS = ("variable_name", "initializer_name", "snapshot_name", "initial_value_name")


def variables_outside(graph: Graph, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return new variables, each as `variable_outside` makes it.

    Args:
        graph: the graph.
        wanted: the name of each variable, and its first value: a float32 array.

    Cost: linear; in a version 1 graph some 0.2 ms each, and 2 ms for each shape.
    """
    if is_func_graph(graph):
        return [variable_outside(graph, initial, name) for name, initial in wanted]
    held = graph.get_collection_ref(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    before = len(held)
    series = _Series(graph)
    planned = [series.plan(name, np.asarray(initial)) for name, initial in wanted]
    series.make()
    variables = [series.variable(entry) for entry in planned]
    held[before:] = variables
    return variables


class _Series:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._patterns: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}
        self._graph_def = new_graph_def(graph)

    def plan(self, name: str, initial: Any) -> Any:
        """Return a variable, or the definition of one that `make` makes."""
        if initial.shape not in self._patterns:
            count = count_ops(self._graph)
            variable = variable_outside(self._graph, initial, name)
            nodes = [op.node_def for op in ops_since(self._graph, count)]
            with neutral(self._graph):
                self._patterns[initial.shape] = variable.to_proto(), nodes
            return variable
        definition, nodes = self._patterns[initial.shape]
        old = definition.variable_name.partition(":")[0]
        new = absolute_unique_name(self._graph, name)
        for node in nodes:
            self._add(node, old, new, initial)
        renamed = type(definition)()
        renamed.CopyFrom(definition)
        for field in _FIELDS:
            setattr(renamed, field, _renamed(getattr(definition, field), old, new))
        return renamed

    def _add(self, node: Any, old: str, new: str, initial: Any) -> None:
        made = self._graph_def.node.add()
        made.CopyFrom(node)
        made.name = _renamed(node.name, old, new)
        made.input[:] = [_renamed(name, old, new) for name in node.input]
        for key in _NAMES:
            if key in made.attr:
                own = made.attr[key].s.decode()
                made.attr[key].s = _renamed(own, old, new).encode()
        if "_class" in made.attr:
            places = made.attr["_class"].list.s
            places[:] = [_moved(place, old, new) for place in places]
        if "value" in made.attr:
            made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(initial))

    def make(self) -> None:
        """Make the ops that are planned."""
        import_ops(self._graph, self._graph_def, {})

    def variable(self, planned: Any) -> Any:
        """Return a variable that was planned, once its ops are there."""
        if isinstance(planned, ResourceVariable):
            return planned
        with neutral(self._graph):
            variable = ResourceVariable.from_proto(planned)
        state_of(self._graph).variables[id(variable)] = variable
        return variable


def _renamed(name: str, old: str, new: str) -> str:
    """Return a name below another variable's."""
    mark = "^" if name.startswith("^") else ""
    return mark + new + name.removeprefix(mark).removeprefix(old)


def _moved(place: bytes, old: str, new: str) -> bytes:
    """Return what an op is colocated with, a variable, as another variable."""
    return f"loc:@{new}".encode() if place == f"loc:@{old}".encode() else place
