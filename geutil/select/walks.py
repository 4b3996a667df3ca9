"""Neighbours: the boundary of a set of ops, and walks ahead of or behind it.

Walks go breadth first and are linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import adjacency, types
from geutil.graph.adjacency import control_inputs as control_inputs_of
from geutil.graph.adjacency import control_outputs as control_outputs_of
from geutil.graph.adjacency import creation_index
from geutil.graph.types import Graph, Operation, Tensor, as_list, is_graph, is_tensor
from geutil.graph.walks import closure
from geutil.select import selections


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
        pairs = ((op, control_outputs_of(op)) for op in self._graph.get_operations())
        return {op: outputs for op, outputs in pairs if outputs}

    def get(self, op: Operation) -> list[Operation]:
        """Return the ops that have `op` as a control input, in graph order.

        Raises:
            ArgumentTypeError: `op` is not an op.
        """
        types.require_op(op)
        return control_outputs_of(op) if op.graph is self._graph else []

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
    for op in selections.make_list_of_op(ops):
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
    listed = list(dict.fromkeys(selections.make_list_of_op(ops)))
    members = frozenset(listed)
    inputs, outputs = ends_of(listed)
    inside = types.unique(t for op in listed for t in op.inputs if t.op in members)
    return inputs, outputs, inside


def inputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops read, each once, in order of their first use."""
    return types.unique(t for op in selections.make_list_of_op(ops) for t in op.inputs)


def outputs_of(ops: Any) -> list[Tensor]:
    """Return the tensors that ops make, in order of the ops."""
    return [t for op in selections.make_list_of_op(ops) for t in op.outputs]


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
    listed = selections.make_list_of_op(ops)
    seeds = selections.make_list_of_op(seed_ops, allow_graph=False)
    boundary = set(selections.make_list_of_op(boundary_ops))
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
    may_visit, seeds = _start(seed_ops, within_ops, selections.get_consuming_ops)
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
    may_visit, seeds = _start(seed_ops, within_ops, selections.get_generating_ops)
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
        else set(selections.make_list_of_op(within_ops, allow_graph=False))
    )
    listed = seeds if is_graph(seeds) else as_list(seeds)
    # Seeds are all ops or all tensors, so the first one tells which.
    if not is_graph(listed) and listed and is_tensor(listed[0]):
        ops = ops_of_tensors(listed)
    else:
        ops = selections.make_list_of_op(listed, allow_graph=False)
    return may_visit, [
        op for op in dict.fromkeys(ops) if may_visit is None or op in may_visit
    ]


def _ids(tensors: Any) -> frozenset[int]:
    return frozenset(id(t) for t in selections.make_list_of_t(tensors))
