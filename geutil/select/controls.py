"""Control edges seen from the producer's side."""

from __future__ import annotations

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph.adjacency import control_outputs as _control_outputs
from geutil.graph.kinds import Graph, Operation, require_graph, require_op, type_name


class ControlOutputs:
    """The control outputs of every op of a graph.

    Look-ups read the graph itself, so they are always up to date.

    Args:
        graph: a `tf.Graph`.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0, name="y")
        >>> [op.name for op in ge.ControlOutputs(graph).get(x.op)]
        ['y']
    """

    def __init__(self, graph: Graph) -> None:
        require_graph(graph)
        self._graph = graph

    def update(self) -> ControlOutputs:
        """Return self; kept for code written when this was a snapshot."""
        return self

    def get_all(self) -> dict[Operation, list[Operation]]:
        """Return the control outputs of every op that has any. Linear in the ops."""
        pairs = ((op, _control_outputs(op)) for op in self._graph.get_operations())
        return {op: outputs for op, outputs in pairs if outputs}

    def get(self, op: Operation) -> list[Operation]:
        """Return the ops that have `op` as a control input, in graph order.

        Raises:
            ArgumentTypeError: `op` is no op.
        """
        require_op(op)
        return _control_outputs(op) if op.graph is self._graph else []

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._graph


def check_cios(
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> tuple[bool, ControlOutputs | None]:
    """Resolve the three arguments by which callers ask for control edges.

    Args:
        control_inputs: whether control inputs count.
        control_outputs: if given, control outputs count.
        control_ios: if given, both count.

    Returns:
        `(control_inputs, control_outputs)`.

    Raises:
        ArgumentTypeError: one of the latter two is no `ControlOutputs`.
        SelectionError: both of the latter two are given.

    Example:
        >>> import geutil as ge
        >>> ge.check_cios(control_inputs=True)
        (True, None)
    """
    for name, value in (
        ("control_outputs", control_outputs),
        ("control_ios", control_ios),
    ):
        if value is not None and not isinstance(value, ControlOutputs):
            raise ArgumentTypeError(
                f"{name} must be a geutil.ControlOutputs, got {type_name(value)}; "
                "pass geutil.ControlOutputs(graph)"
            )
    if control_ios is None:
        return control_inputs, control_outputs
    if control_outputs is not None:
        raise SelectionError("pass control_ios or control_outputs, not both")
    return True, control_ios
