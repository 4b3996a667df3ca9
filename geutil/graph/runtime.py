"""The runtime's choices: XLA, determinism, and Grappler run from Python.

A Session or function optimizes its graph before it runs it: ops are folded, merged and
removed. What then runs can be read off here without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph import _tf
from geutil.graph._tf import GraphOrParentsInXlaContext, OptimizeGraph
from geutil.graph.protos import MetaGraphDef
from geutil.graph.types import Graph, require_graph

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


def is_determinism_enabled() -> bool:
    """Tell whether `tf.config.experimental.enable_op_determinism` was called.

    TensorFlow does not keep the promise for sums of three or more (`AddN`) whose terms
    other ops read too: in what order it adds depends on which ops have run.
    """
    return bool(_tf.is_op_determinism_enabled())


def is_compiled_by_xla(graph: Graph) -> bool:
    """Tell whether XLA will compile the ops that are now being added to `graph`.

    So it is while a `tf.function` with `jit_compile=True` is traced, and while any
    function, loop body or branch is traced from within one.

    TensorFlow does not trace a function again when a compiled one calls it after all:
    a function that was traced before, outside, keeps what was built then.

    TensorFlow knows this during the trace only. Afterwards, and for what is decided
    when a graph runs, the answer is False: auto-clustering of a Session
    (`global_jit_level`), of a process (`tf.config.optimizer.set_jit`) or by the
    environment (`TF_XLA_FLAGS`).

    Args:
        graph: a graph.

    Raises:
        ArgumentTypeError: `graph` is not a graph.

    Cost: linear in the number of graphs around `graph`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.graph.runtime import is_compiled_by_xla
        >>> answers = []
        >>> def body():
        ...     answers.append(is_compiled_by_xla(tf.compat.v1.get_default_graph()))
        >>> tf.function(body)()
        >>> tf.function(body, jit_compile=True)()
        >>> answers
        [False, True]
    """
    require_graph(graph)
    return bool(GraphOrParentsInXlaContext(graph))
