"""The boundary of a set of ops: neighbours, tensors, control edges, floods."""

from __future__ import annotations

from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import adjacency, types
from geutil.graph.adjacency import control_inputs as control_inputs_of
from geutil.graph.adjacency import control_outputs as _control_outputs
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.select.conversions import make_list_of_op


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
        types.require_graph(graph)
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
            ArgumentTypeError: `op` is not an op.
        """
        types.require_op(op)
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
    """Resolve the three arguments that select control edges.

    Args:
        control_inputs: whether control inputs count.
        control_outputs: if given, control outputs count.
        control_ios: if given, both count.

    Returns:
        `(control_inputs, control_outputs)`.

    Raises:
        ArgumentTypeError: one of the latter two is not a `ControlOutputs`.
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
                f"{name} must be a geutil.ControlOutputs, "
                f"got {types.type_name(value)}; pass geutil.ControlOutputs(graph)"
            )
    if control_ios is None:
        return control_inputs, control_outputs
    if control_outputs is not None:
        raise SelectionError("pass control_ios or control_outputs, not both")
    # `control_ios` stands for both kinds of control edges.
    return True, control_ios


def get_ops_ios(
    ops: Any,
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> list[Operation]:
    """Return the ops at the other end of an edge of one of `ops`, each once.

    Args:
        ops: anything that `make_list_of_op` takes.
        control_inputs: whether control inputs count as edges.
        control_outputs: if given, control outputs count too.
        control_ios: if given, both count.

    Returns:
        Op by op: producers, consumers, control outputs, control inputs.

    Raises:
        ArgumentTypeError: `ops` is not made of ops, or see `check_cios`.

    Cost: linear in the ops and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> [op.name for op in ge.get_ops_ios(y.op)]
        ['x', 'z']
    """
    control_inputs, control_outputs = check_cios(
        control_inputs, control_outputs, control_ios
    )
    neighbours: dict[Operation, None] = {}
    for op in make_list_of_op(ops):
        for t in op.inputs:
            neighbours[t.op] = None
        for t in op.outputs:
            neighbours.update(dict.fromkeys(adjacency.consumers(t)))
        if control_outputs is not None:
            neighbours.update(dict.fromkeys(control_outputs.get(op)))
        if control_inputs:
            neighbours.update(dict.fromkeys(control_inputs_of(op)))
    return list(neighbours)


def compute_boundary_ts(
    ops: Any,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tensors at the boundary of a set of ops.

    A tensor that is read both inside and outside is in `outputs` and in `inside`.

    Args:
        ops: anything that `make_list_of_op` takes.

    Returns:
        `(inputs, outputs, inside)`: tensors read by `ops` and computed elsewhere, in
        order of first use; tensors computed by `ops` and read elsewhere or not at all,
        in order of the ops; tensors computed and read by `ops`, in order of first use.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> inputs, outputs, inside = ge.compute_boundary_ts([y.op, z.op])
        >>> (
        ...     [t.name for t in inputs],
        ...     [t.name for t in outputs],
        ...     [t.name for t in inside],
        ... )
        (['x:0'], ['z:0'], ['y:0'])
    """
    listed = list(dict.fromkeys(make_list_of_op(ops)))
    members = frozenset(listed)
    inputs, outputs = ends_of(listed)
    inside = types.unique(t for op in listed for t in op.inputs if t.op in members)
    return inputs, outputs, inside


def inputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops read, each once, in order of their first use."""
    return types.unique(t for op in make_list_of_op(ops) for t in op.inputs)


def outputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops make, in order of the ops."""
    return [t for op in make_list_of_op(ops) for t in op.outputs]


def ends_of(ops: list[Operation]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of a set of ops, as `compute_boundary_ts` does."""
    members = frozenset(ops)
    inputs = types.unique(t for op in ops for t in op.inputs if t.op not in members)
    outputs = []
    for op in ops:
        for t in op.outputs:
            readers = t.consumers()
            if not readers or not members.issuperset(readers):
                outputs.append(t)
    return inputs, outputs


def get_within_boundary_ops(
    ops: Any,
    seed_ops: Any,
    boundary_ops: Any = (),
    inclusive: bool = True,
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> list[Operation]:
    """Return the ops reached from seeds, along edges either way, up to a boundary.

    Args:
        ops: the ops to choose from (anything that `make_list_of_op` takes).
        seed_ops: where to start.
        boundary_ops: ops at which the search stops.
        inclusive: whether the result includes the boundary ops that are reached.
        control_inputs: whether to follow control inputs.
        control_outputs: if given, control outputs are followed too.
        control_ios: if given, both are followed.

    Returns:
        Ops of `ops`, in that order.

    Raises:
        ArgumentTypeError: an argument is not made of ops.
        SelectionError: a seed lies on the boundary.

    Cost: linear in the ops reached and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> [op.name for op in ge.get_within_boundary_ops(graph, x.op, y.op)]
        ['x', 'y']
    """
    control_inputs, control_outputs = check_cios(
        control_inputs, control_outputs, control_ios
    )
    listed = make_list_of_op(ops)
    seeds = make_list_of_op(seed_ops, allow_graph=False)
    boundary = set(make_list_of_op(boundary_ops))
    for op in seeds:
        if op in boundary:
            raise SelectionError(
                f"seed '{op.name}' lies on the boundary; take it out of boundary_ops"
            )

    def around(op: Operation) -> list[Operation]:
        # A walk ends at the boundary, whose ops are reached if they count.
        if op in boundary:
            return []
        neighbours = get_ops_ios(op, control_inputs, control_outputs)
        return [o for o in neighbours if inclusive or o not in boundary]

    reached = closure(seeds, around)
    return [op for op in listed if op in reached]
