"""Graph collections, and the variables of version 1 in them.

A `tf.Variable` made in a `tf.Graph` is a Python object in the graph's collections
besides its ops. Without the object a copy has no initializer to run and nothing for
`tf.compat.v1.train.Saver` to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.graph._tf import ResourceVariable, UninitializedVariable, VariableDef
from geutil.graph.creation import neutral
from geutil.graph.types import Graph, MutableIdentityMap
from geutil.graph.walks import node_name


@dataclass(frozen=True)
class VariableFacts:
    """The facts of one variable in a collection."""

    key: str
    trainable: bool
    # Where it begins in the variable that it is a part of, if it is a part.
    offset: tuple[int, ...] | None
    initializer: str  # The name of the op that initializes it.


def variable_facts(collections: Mapping[str, Any]) -> dict[str, VariableFacts]:
    """Return the facts in a MetaGraph's collections, by the name of a variable's op."""
    trainable = {
        d.variable_name for d in _definitions(collections, "trainable_variables")
    }
    facts = {}
    for key in sorted(collections):
        for definition in _definitions(collections, key):
            name = node_name(definition.variable_name)
            part = definition.save_slice_info_def
            facts[name] = VariableFacts(
                part.full_name or name,
                definition.variable_name in trainable,
                tuple(part.var_offset) if part.full_name else None,
                node_name(definition.initializer_name),
            )
    return facts


def _definitions(collections: Mapping[str, Any], key: str) -> list[Any]:
    if key not in collections or "variables" not in key:
        return []
    definitions = []
    for data in collections[key].bytes_list.value:
        definition = VariableDef()
        definition.ParseFromString(data)
        definitions.append(definition)
    return definitions


def uninitialized_variable(dtype: Any, shape: Any, trainable: bool, name: str) -> Any:
    """Return an eager variable that has no value yet."""
    return UninitializedVariable(
        dtype=tf.as_dtype(dtype), shape=shape, trainable=trainable, name=name
    )


_logger = logging.getLogger("geutil")
_NAMES = ("variable_name", "initializer_name", "snapshot_name", "initial_value_name")


def carry_variables(
    graph: Graph,
    graph_: Graph,
    rename: Callable[[str], str | None],
    collection_name: Callable[[str], str],
) -> None:
    """Make variable objects in `graph_` for those of `graph` whose ops were copied."""
    # A variable of which a part has no copy is left out, with a warning.
    carried: MutableIdentityMap[tf.Variable | None] = MutableIdentityMap()
    for key in graph.get_all_collection_keys():
        for element in graph.get_collection_ref(key):
            if not isinstance(element, tf.Variable):
                continue
            if element not in carried:
                carried[element] = _carry(element, graph_, rename)
            variable_ = carried[element]
            if variable_ is not None:
                graph_.add_to_collection(collection_name(key), variable_)


def _carry(
    variable: tf.Variable, graph_: Graph, rename: Callable[[str], str | None]
) -> tf.Variable | None:
    # Outside a graph TensorFlow takes the request for one about an eager variable.
    with neutral(variable.graph):
        definition = variable.to_proto()
    if rename(definition.variable_name) is None:
        return None
    for field in _NAMES:
        name = getattr(definition, field)
        if not name:
            continue
        new = rename(name)
        if new is None:
            _logger.warning(
                "variable '%s' is copied without a tf.Variable object: '%s' is not "
                "among the copied ops; copy it too",
                variable.name,
                name,
            )
            return None
        setattr(definition, field, new)
    with neutral(graph_):
        if definition.is_resource:
            return ResourceVariable.from_proto(definition)
        return tf.compat.v1.Variable.from_proto(definition)
