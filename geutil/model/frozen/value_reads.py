"""Ops that read variables turned into ops that read values.

Nodes are changed in place: what read a handle reads the value that takes its place.
References to a node stay as they are, except in functions, which name the outputs of
ops: see `OUTPUT_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.model.frozen.handle_flow import Value
from geutil.model.programs.constants import const_node

OUTPUT_NAMES = {"ReadVariableOp": "value", "VarIsInitializedOp": "is_initialized"}
"""Names of outputs of ops that are called `output` in what takes their place."""


def become(node: Any, op: str, **types: int) -> None:
    """Change the type of a node; attributes that start with `_` stay."""
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.op = op
    node.ClearField("experimental_type")
    for name, dtype in types.items():
        node.attr[name].type = dtype


def _read(node: Any, value: Value) -> None:
    become(node, "Identity", T=value.dtype)


def _gather(node: Any, value: Value) -> None:
    indices = node.attr["Tindices"].type
    batch_dims = node.attr["batch_dims"].i
    axis = tf.int32.as_datatype_enum
    become(node, "GatherV2", Tparams=value.dtype, Tindices=indices, Taxis=axis)
    node.attr["batch_dims"].i = batch_dims


def _gather_nd(node: Any, value: Value) -> None:
    indices = node.attr["Tindices"].type
    become(node, "GatherNd", Tparams=value.dtype, Tindices=indices)


def _shape(node: Any, value: Value) -> None:
    out_type = node.attr["out_type"].type or tf.int32.as_datatype_enum
    become(node, "Shape", T=value.dtype, out_type=out_type)


def _is_initialized(node: Any, _: Value) -> None:
    become(node, "Const")
    node.attr["dtype"].type = tf.bool.as_datatype_enum
    true = const_node("", tf.constant(True))
    node.attr["value"].CopyFrom(true.attr["value"])


READS: dict[str, Callable[[Any, Value], None]] = {
    "ReadVariableOp": _read,
    "ResourceGather": _gather,
    "ResourceGatherNd": _gather_nd,
    "VariableShape": _shape,
    "VarIsInitializedOp": _is_initialized,
}
"""By type of op: what turns a node that reads a handle into one that reads a value."""


def turn_into_value_read(
    node: Any,
    value: Value,
    fresh: Callable[[str], str],
    *,
    waits: Iterable[str] = (),
    in_function: bool,
) -> list[Any]:
    """Turn a node of a type in `READS` into one that reads a value.

    Args:
        node: the node, which is changed; its first input is the handle.
        value: what takes the place of the handle.
        fresh: makes a name that is free, and reserves it.
        waits: control inputs for constants: in a loop of version 1 a constant has to
            wait for something that is in the loop too.
        in_function: whether the node writes references as functions do.

    Returns:
        The nodes that it needs besides.
    """
    kind = node.op
    axis = node.attr["batch_dims"].i if kind == "ResourceGather" else 0
    READS[kind](node, value)
    if kind == "VarIsInitializedOp":
        del node.input[0]
        node.input.extend(wait for wait in waits if wait not in node.input)
    if kind != "ResourceGather":
        return []
    added = const_node(fresh(f"{node.name}/axis"), tf.constant(np.int32(axis)))
    added.device = node.device
    added.input.extend(waits)
    controls = node.input[2:]
    del node.input[2:]
    node.input.append(f"{added.name}:output:0" if in_function else added.name)
    node.input.extend(controls)
    return [added]
