"""Adding and removing control inputs."""

from __future__ import annotations

from typing import Any

from geutil.errors import RerouteError
from geutil.graph.types import Operation, require_op
from geutil.reroute.tensors import ReroutePlan
from geutil.select.conversions import graph_of_all, make_list_of_op


def remove_control_inputs(op: Operation, cops: Any) -> None:
    """Make `op` wait no longer for some ops.

    Args:
        op: the op that waits.
        cops: an op, or ops, that are control inputs of it.

    Raises:
        ArgumentTypeError: an argument is not made of ops.
        RerouteError: one of `cops` is no control input of `op`.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: quadratic in the control inputs that stay: TensorFlow can only take off all,
        and put these on again.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0)
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0)
        >>> ge.remove_control_inputs(y.op, x.op)
        >>> y.op.control_inputs
        []
    """
    removed = _control_ops(op, cops)
    present = frozenset(op.control_inputs)
    for cop in removed:
        if cop not in present:
            raise RerouteError(
                f"'{cop.name}' is no control input of '{op.name}'; its control inputs "
                f"are {[c.name for c in op.control_inputs]}"
            )
    plan = ReroutePlan(op.graph)
    plan.drop_control_inputs(op, removed)
    plan.apply()


def add_control_inputs(op: Operation, cops: Any) -> None:
    """Make `op` wait for more ops.

    Args:
        op: the op that shall wait.
        cops: an op, or ops, of the same graph.

    Raises:
        ArgumentTypeError: an argument is not made of ops.
        RerouteError: one of `cops` is a control input of `op` already.
        SelectionError: the ops belong to different graphs.
        CycleError: the control edges would close a cycle.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the control inputs of `op`, and see
    `geutil.graph.edits.apply_edits`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        >>> ge.add_control_inputs(y.op, x.op)
        >>> [op.name for op in y.op.control_inputs]
        ['x']
    """
    added = _control_ops(op, cops)
    present = frozenset(op.control_inputs)
    for cop in added:
        if cop in present:
            raise RerouteError(
                f"'{cop.name}' is a control input of '{op.name}' already; leave it out"
            )
    if added:
        plan = ReroutePlan(op.graph)
        plan.set_control_inputs(op, [*op.control_inputs, *added])
        plan.apply()


def _control_ops(op: Operation, cops: Any) -> list[Operation]:
    require_op(op)
    listed = list(dict.fromkeys(make_list_of_op(cops, allow_graph=False)))
    graph_of_all([op, *listed])
    return listed
