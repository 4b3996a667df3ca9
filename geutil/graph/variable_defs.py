"""What graphs tell of their variables beyond the ops: the protos in collections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.graph._tf import UninitializedVariable, VariableDef


@dataclass(frozen=True)
class VariableFacts:
    """What a collection tells of one variable.

    Attributes:
        key: its name in a checkpoint.
        trainable: whether it is trained.
        offset: where it begins in the variable that it is a part of, if it is a part.
        initializer: the name of the op that initializes it.
    """

    key: str
    trainable: bool
    offset: tuple[int, ...] | None
    initializer: str


def variable_facts(collections: Mapping[str, Any]) -> dict[str, VariableFacts]:
    """Return what the collections of a MetaGraph tell, by the name of a variable's op.

    Args:
        collections: `CollectionDef` protos by name.
    """
    trainable = {
        d.variable_name for d in _definitions(collections, "trainable_variables")
    }
    facts = {}
    for key in sorted(collections):
        for definition in _definitions(collections, key):
            name = definition.variable_name.partition(":")[0]
            part = definition.save_slice_info_def
            facts[name] = VariableFacts(
                part.full_name or name,
                definition.variable_name in trainable,
                tuple(part.var_offset) if part.full_name else None,
                definition.initializer_name.partition(":")[0],
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
