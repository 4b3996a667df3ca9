"""What TensorFlow merges when Grappler is off: equal constants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def with_constants_merged(graph_def: Any, fetches: Iterable[str]) -> Any:
    """Return a `GraphDef` in which one node stands for all constants of a value.

    As the executor's own common subexpression elimination does. Of nodes that wait for
    nothing, those made first run first: with a constant of its own, the update of each
    weight would come after all the rest.

    Args:
        graph_def: the nodes.
        fetches: the names of the ops and tensors that are asked for; these are left.

    Cost: linear in the nodes, their inputs and the bytes of the constants.
    """
    asked = {name.split(":")[0] for name in fetches}
    result = tf.compat.v1.GraphDef(versions=graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    instead: dict[str, str] = {}
    met: dict[bytes, str] = {}
    for node in graph_def.node:
        if node.op == "Const" and not node.input and node.name not in asked:
            first = met.setdefault(_value(node), node.name)
            if first != node.name:
                instead[node.name] = instead[f"^{node.name}"] = first
                continue
        result.node.add().CopyFrom(node)
    for node in result.node:
        for i, name in enumerate(node.input):
            if name in instead:
                control = "^" if name.startswith("^") else ""
                node.input[i] = control + instead[name]
    return result


def _value(constant: Any) -> bytes:
    nameless = tf.compat.v1.NodeDef()
    nameless.CopyFrom(constant)
    nameless.name = ""
    return bytes(nameless.SerializeToString(deterministic=True))
