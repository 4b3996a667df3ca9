"""Whether XLA compiles what is being traced."""

from __future__ import annotations

from geutil.graph._tf import GraphOrParentsInXlaContext
from geutil.graph.kinds import Graph, require_graph


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
        >>> from geutil.graph.xla import is_compiled_by_xla
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
