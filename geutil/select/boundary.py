"""Where a set of ops ends: neighbours, boundary tensors, floods up to a boundary."""

from __future__ import annotations

from typing import Any

from geutil.errors import SelectionError
from geutil.graph.adjacency import consumers
from geutil.graph.adjacency import control_inputs as control_inputs_of
from geutil.graph.identity import unique
from geutil.graph.kinds import Operation, Tensor
from geutil.select.controls import ControlOutputs, check_cios
from geutil.select.lists import make_list_of_op


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
    found: dict[Operation, None] = {}
    for op in make_list_of_op(ops):
        for t in op.inputs:
            found[t.op] = None
        for t in op.outputs:
            found.update(dict.fromkeys(consumers(t)))
        if control_outputs is not None:
            found.update(dict.fromkeys(control_outputs.get(op)))
        if control_inputs:
            found.update(dict.fromkeys(control_inputs_of(op)))
    return list(found)


def compute_boundary_ts(
    ops: Any,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tensors at the boundary of a set of ops.

    A tensor that is read both inside and outside is an output and inside.

    Args:
        ops: anything that `make_list_of_op` takes.

    Returns:
        `(inputs, outputs, inside)`: tensors read by `ops` and made elsewhere, in order
        of their first use; tensors made by `ops` and read elsewhere or not at all, in
        order of the ops; tensors made and read by `ops`, in order of their first use.

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
    inside = unique(t for op in listed for t in op.inputs if t.op in members)
    return inputs, outputs, inside


def inputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops read, each once, in order of their first use.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops and their inputs.
    """
    return unique(t for op in make_list_of_op(ops) for t in op.inputs)


def outputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops make, in order of the ops.

    Raises:
        ArgumentTypeError: `ops` is not made of ops.

    Cost: linear in the ops and their outputs.
    """
    return [t for op in make_list_of_op(ops) for t in op.outputs]


def ends_of(ops: list[Operation]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs of a set of ops, as `compute_boundary_ts` does.

    Cost: linear in the ops and their edges; in memory, one set of the ops.
    """
    members = frozenset(ops)
    inputs = unique(t for op in ops for t in op.inputs if t.op not in members)
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
        boundary_ops: ops that are not crossed.
        inclusive: whether the boundary ops that are met belong to the result.
        control_inputs: whether control inputs are followed.
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
    reached = set(seeds)
    queue = list(dict.fromkeys(seeds))
    for op in queue:
        for neighbour in get_ops_ios(op, control_inputs, control_outputs):
            if neighbour in reached:
                continue
            if neighbour not in boundary:
                reached.add(neighbour)
                queue.append(neighbour)
            elif inclusive:
                reached.add(neighbour)
    return [op for op in listed if op in reached]
