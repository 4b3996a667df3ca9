"""Grappler, TensorFlow's graph optimizer, run from Python.

A Session or function optimizes its graph before it runs it: ops are folded, merged and
removed. What then runs can be read off here without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph._tf import OptimizeGraph
from geutil.graph.protos import MetaGraphDef

_COLOCATION = "_class"
_KEPT = "_geutil_class"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def optimized(graph_def: Any, fetches: Iterable[str]) -> Any:
    """Return a `GraphDef` as a Session with default options would run it.

    Args:
        graph_def: the ops behind the fetches. Placeholders are fed.
        fetches: the names of the ops and tensors that are asked for.

    Returns:
        A new `GraphDef`. The ops that are asked for keep their names.

    Raises:
        tf.errors.OpError: Grappler does not take the graph.

    Cost: linear in the nodes in practice; some 0.1 ms for each.
    """
    names = list(fetches)
    if not names:
        return graph_def
    meta = MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    for node in meta.graph_def.node:
        # A Session places ops before it optimizes; some rewrites are for CPU ops only.
        node.device = node.device or _CPU
        if _COLOCATION in node.attr:
            # Grappler drops colocation when it is run from Python; a Session keeps it,
            # and does not merge ops that differ in it.
            node.attr[_KEPT].CopyFrom(node.attr[_COLOCATION])
    # Where Grappler looks for what it must keep.
    meta.collection_def["train_op"].node_list.value.extend(names)
    with tf.Graph().as_default():
        result = OptimizeGraph(tf.compat.v1.ConfigProto(), meta)
    for node in result.node:
        node.attr.pop(_KEPT, None)
    return result
