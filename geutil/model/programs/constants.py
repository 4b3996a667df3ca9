"""Constants as nodes, bit for bit."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def const_node(name: str, value: Any) -> Any:
    """Return the node of a constant; see `become_const`."""
    node = tf.compat.v1.NodeDef()
    become_const(node, name, value)
    return node


def become_const(node: Any, name: str, value: Any) -> None:
    """Turn a node into a constant, in place.

    Args:
        node: the node, of which nothing is left.
        name: the name of the constant.
        value: an eager tensor of a dtype that has values.
    """
    node.Clear()
    node.name, node.op = name, "Const"
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    # In C++: every dtype, and floats as they are, which Python's would not keep.
    node.attr["value"].tensor.ParseFromString(tf.io.serialize_tensor(value).numpy())


def value_of_const(node: Any) -> Any:
    """Return the value of a Const node as an eager tensor."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    return tf.io.parse_tensor(node.attr["value"].tensor.SerializeToString(), dtype)
