"""Walks: everything ahead of, or behind, some ops. Breadth first, linear."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from geutil.graph.adjacency import control_inputs as control_inputs_of
from geutil.graph.adjacency import control_outputs as control_outputs_of
from geutil.graph.adjacency import creation_index
from geutil.graph.types import Operation, as_list, is_graph, is_tensor
from geutil.select import conversions
from geutil.select.boundary import ControlOutputs, check_cios

OpPredicate = Callable[[Operation], Any]


def get_forward_walk_ops(
    seed_ops: Any,
    inclusive: bool = True,
    within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None,
    stop_at_ts: Any = (),
    control_outputs: ControlOutputs | None = None,
) -> list[Operation]:
    """Return the ops that depend on some ops or tensors.

    Args:
        seed_ops: ops, or tensors, whose consumers are the seeds; [] gives [].
        inclusive: whether the result includes the seeds.
        within_ops: the ops that the walk may visit, seeds included; None is all,
            an empty list is none.
        within_ops_fn: a predicate on the ops that the walk may visit beyond the seeds.
        stop_at_ts: tensors that the walk does not go through.
        control_outputs: if given, control outputs are followed.

    Returns:
        Each op once, breadth first from the seeds, the consumers of a tensor in
        graph order.

    Raises:
        ArgumentTypeError: an argument is not made of ops or tensors.

    Cost: linear in the ops visited and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> [op.name for op in ge.get_forward_walk_ops(x.op)]
        ['x', 'y', 'z']
        >>> [op.name for op in ge.get_forward_walk_ops(x, inclusive=False)]
        ['z']
    """
    _, control_outputs = check_cios(False, control_outputs)
    may_visit, seeds = _start(seed_ops, within_ops, conversions.get_consuming_ops)
    stops = _ids(stop_at_ts)

    seen = set(seeds)
    walk = list(seeds)
    for op in walk:
        for t in op.outputs:
            if stops and id(t) in stops:
                continue
            readers = t.consumers()
            # From some edges on, TensorFlow returns them in the order of addresses.
            if len(readers) > 1:
                readers.sort(key=creation_index)
            for reader in readers:
                if (
                    reader not in seen
                    and (may_visit is None or reader in may_visit)
                    and (within_ops_fn is None or within_ops_fn(reader))
                ):
                    seen.add(reader)
                    walk.append(reader)
        if control_outputs is not None:
            waiting = control_outputs_of(op)
            walk += _unseen(waiting, seen, may_visit, within_ops_fn)
    return walk if inclusive else walk[len(seeds) :]


def get_backward_walk_ops(
    seed_ops: Any,
    inclusive: bool = True,
    within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None,
    stop_at_ts: Any = (),
    control_inputs: bool = False,
) -> list[Operation]:
    """Return the ops that some ops or tensors depend on.

    Args:
        seed_ops: ops, or tensors, whose producers are the seeds; [] gives [].
        inclusive: whether the result includes the seeds.
        within_ops: the ops that the walk may visit, seeds included; None is all,
            an empty list is none.
        within_ops_fn: a predicate on the ops that the walk may visit beyond the seeds.
        stop_at_ts: tensors that the walk does not go through.
        control_inputs: whether to follow control inputs.

    Returns:
        Each op once, breadth first from the seeds, in the order of the inputs.

    Raises:
        ArgumentTypeError: an argument is not made of ops or tensors.

    Cost: linear in the ops visited and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> [op.name for op in ge.get_backward_walk_ops(z)]
        ['z', 'y', 'x']
        >>> [op.name for op in ge.get_backward_walk_ops(z, stop_at_ts=[x])]
        ['z', 'y']
    """
    may_visit, seeds = _start(seed_ops, within_ops, conversions.get_generating_ops)
    stops = _ids(stop_at_ts)

    seen = set(seeds)
    walk = list(seeds)
    for op in walk:
        for t in op.inputs:
            if stops and id(t) in stops:
                continue
            producer = t.op
            if (
                producer not in seen
                and (may_visit is None or producer in may_visit)
                and (within_ops_fn is None or within_ops_fn(producer))
            ):
                seen.add(producer)
                walk.append(producer)
        if control_inputs:
            awaited = control_inputs_of(op)
            walk += _unseen(awaited, seen, may_visit, within_ops_fn)
    return walk if inclusive else walk[len(seeds) :]


def get_walks_intersection_ops(
    forward_seed_ops: Any,
    backward_seed_ops: Any,
    forward_inclusive: bool = True,
    backward_inclusive: bool = True,
    within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None,
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> list[Operation]:
    """Return the ops on a path from the forward seeds to the backward seeds.

    Args:
        forward_seed_ops: see `get_forward_walk_ops`.
        backward_seed_ops: see `get_backward_walk_ops`.
        forward_inclusive: whether the forward seeds belong to the forward walk.
        backward_inclusive: whether the backward seeds belong to the backward walk.
        within_ops: the ops that the walks may visit.
        within_ops_fn: a predicate on the ops that the walks may visit.
        control_inputs: whether the backward walk follows control inputs.
        control_outputs: if given, the forward walk follows control outputs.
        control_ios: if given, both hold.

    Returns:
        The ops that both walks visit, in the order of the forward walk.

    Raises:
        ArgumentTypeError: an argument is not made of ops or tensors.

    Cost: linear in the ops visited and their edges.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z") + tf.negative(x)
        >>> [op.name for op in ge.get_walks_intersection_ops(y.op, z.op)]
        ['y', 'z', 'add']
    """
    forward, backward = _both_walks(
        (forward_seed_ops, forward_inclusive),
        (backward_seed_ops, backward_inclusive),
        (within_ops, within_ops_fn),
        check_cios(control_inputs, control_outputs, control_ios),
    )
    behind = frozenset(backward)
    return [op for op in forward if op in behind]


def get_walks_union_ops(
    forward_seed_ops: Any,
    backward_seed_ops: Any,
    forward_inclusive: bool = True,
    backward_inclusive: bool = True,
    within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None,
    control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None,
) -> list[Operation]:
    """Return the ops that a forward or a backward walk visits.

    The arguments, errors and cost are those of `get_walks_intersection_ops`.

    Returns:
        The forward walk, then the ops that the backward walk adds to it.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        ...     z = tf.negative(y, name="z")
        >>> [op.name for op in ge.get_walks_union_ops(y.op, y.op)]
        ['y', 'z', 'x']
    """
    forward, backward = _both_walks(
        (forward_seed_ops, forward_inclusive),
        (backward_seed_ops, backward_inclusive),
        (within_ops, within_ops_fn),
        check_cios(control_inputs, control_outputs, control_ios),
    )
    return list(dict.fromkeys((*forward, *backward)))


def _unseen(
    ops: list[Operation],
    seen: set[Operation],
    may_visit: Collection[Operation] | None,
    within_ops_fn: OpPredicate | None,
) -> list[Operation]:
    """Return those of `ops` that a walk goes on to, and add them to `seen`."""
    # The walks do the same in place for tensors, because a call for each costs as much
    # as all the rest.
    unseen_ops = [
        op
        for op in ops
        if op not in seen
        and (may_visit is None or op in may_visit)
        and (within_ops_fn is None or within_ops_fn(op))
    ]
    seen.update(unseen_ops)
    return unseen_ops


def _both_walks(
    ahead_of: tuple[Any, bool],
    behind: tuple[Any, bool],
    within: tuple[Any, OpPredicate | None],
    controls: tuple[bool, ControlOutputs | None],
) -> tuple[list[Operation], list[Operation]]:
    """Return a forward and a backward walk: (seeds, inclusive), limits, controls."""
    control_inputs, control_outputs = controls
    return (
        get_forward_walk_ops(*ahead_of, *within, control_outputs=control_outputs),
        get_backward_walk_ops(*behind, *within, control_inputs=control_inputs),
    )


def _start(
    seeds: Any, within_ops: Any, ops_of_tensors: Callable[[Any], list[Operation]]
) -> tuple[set[Operation] | None, list[Operation]]:
    """Return the ops that may be visited (None for all) and the seeds, each once."""
    may_visit = (
        None
        if within_ops is None
        else set(conversions.make_list_of_op(within_ops, allow_graph=False))
    )
    listed = seeds if is_graph(seeds) else as_list(seeds)
    # Seeds are all ops or all tensors, so the first one tells which.
    if not is_graph(listed) and listed and is_tensor(listed[0]):
        ops = ops_of_tensors(listed)
    else:
        ops = conversions.make_list_of_op(listed, allow_graph=False)
    return may_visit, [
        op for op in dict.fromkeys(ops) if may_visit is None or op in may_visit
    ]


def _ids(tensors: Any) -> frozenset[int]:
    return frozenset(id(t) for t in conversions.make_list_of_t(tensors))
