"""Sums over the replicas of `tf.distribute`: ranges by them, and their order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import adjacency, op_types, replicas
from geutil.graph.edits import ControlEdit, apply_edits
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import walk_by_identity


def all_reduce_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least of `low` and the greatest of `high` over all replicas."""
    # tf.distribute reduces by sums and means only. So each replica writes its own into
    # a row of zeros, and the rows are summed: exactly, and with a single transfer.
    context = replicas.current()
    count = context.num_replicas_in_sync
    ends = tf.stack([low, high])
    row = tf.reshape(tf.cast(context.replica_id_in_sync_group, tf.int32), [1, 1])
    shape = tf.concat([[count], tf.shape(ends)], 0)
    own = tf.scatter_nd(row, tf.expand_dims(tf.stop_gradient(ends), 0), shape)
    rows = tf.ensure_shape(
        context.all_reduce(tf.distribute.ReduceOp.SUM, own),
        [count, *ends.shape.as_list()],
    )
    return tf.reduce_min(rows[:, 0], 0), tf.reduce_max(rows[:, 1], 0)


def order_exchanges(graph: Graph) -> None:
    """Have sums over replicas run one after another in topological order."""
    # TensorFlow chains them on each device in the order in which they were made, when
    # it has traced the function. A sum that an edit puts before an older one would wait
    # for that for ever. Each replica has to call this.
    replicas.merge_call(None, lambda _strategy, _contents: _order_exchanges(graph))


def _order_exchanges(graph: Graph) -> None:
    manager = graph.experimental_acd_manager
    chains = _chains(graph)
    if manager is None or not chains:
        return
    place = {
        op: i for i, op in enumerate(adjacency.topological_sort(graph.get_operations()))
    }
    # Each sum has an op on every device, made in turn: all take the order of one.
    first = chains[0]
    order = sorted(range(len(first)), key=lambda i: place[first[i]])
    if any(len(chain) != len(first) for chain in chains):
        raise TransformError(
            "replicas have different numbers of sums over replicas on their devices: "
            f"{[len(chain) for chain in chains]}; quantize each replica alike"
        )
    if order == sorted(order):
        return
    pairs = [pair for chain in chains for pair in pairwise([chain[i] for i in order])]
    controls = [
        ControlEdit(op, (*op.control_inputs, before))
        for before, op in pairs
        if before not in op.control_inputs
    ]
    apply_edits(graph, controls=controls)
    # The last stays in TensorFlow's own chain, before what is made later.
    for before, _ in pairs:
        if _INDEPENDENT not in before.node_def.attr:
            manager.run_independently(before)


_INDEPENDENT = "_independent_side_effects"


def _chains(graph: Graph) -> list[list[Operation]]:
    """Return the ops that TensorFlow would chain on each device, by their tokens."""
    chains: dict[int, list[Operation]] = {}
    for op in graph.get_operations():
        if op.type in op_types.REDUCTIONS_OVER_REPLICAS:
            for t in op.inputs:
                if t.dtype == tf.resource:
                    chains.setdefault(id(t), []).append(op)
    return list(chains.values())


_EXCHANGING = (
    op_types.REDUCTIONS_OVER_REPLICAS
    | op_types.SUMS
    | {"Concat", "ConcatV2", "Identity", "IdentityN", "Reshape", "SplitV"}
)


def own_summand(tensor: Tensor, is_summand: Callable[[Operation], bool]) -> Tensor:
    """Return the summand of a replica in a sum, where TensorFlow keeps it."""

    def behind(t: Tensor) -> list[Tensor]:
        if t.op.type not in _EXCHANGING:
            return []
        # The last comes first: IdentityN has the summand behind the sum.
        return [i for i in reversed(t.op.inputs) if i.dtype == tensor.dtype]

    tensors = walk_by_identity([tensor], behind)
    return next((t for t in tensors if is_summand(t.op)), tensor)
