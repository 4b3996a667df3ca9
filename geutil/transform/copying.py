"""Copying views, with inputs replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from geutil.errors import ArgumentTypeError, TransformError
from geutil.graph import adjacency, types, v1_control_flow
from geutil.graph.types import Graph, IdentityMap, IdentitySet, Operation, Tensor
from geutil.select import conversions, queries, walks
from geutil.select.boundary import ControlOutputs
from geutil.select.subgraph import SubGraphView
from geutil.transform.state import TransformerInfo
from geutil.transform.transformer import Transformer, copy_replacing

_logger = logging.getLogger("geutil")

Replacements = Mapping[Any, Tensor] | Iterable[tuple[Any, Tensor]]


def copy(
    sgv: Any,
    dst_graph: Graph | None = None,
    dst_scope: str = "",
    src_scope: str = "",
    reuse_dst_scope: bool = False,
) -> tuple[SubGraphView, TransformerInfo]:
    """Copy a view, with placeholders for its inputs.

    The copy preserves attributes, device strings, control inputs, collections, static
    shapes, loops and conditionals, function bodies. Colocation refers to the copies if
    they exist, else to the originals. The copy can be differentiated.

    Args:
        sgv: a view, or anything that `make_view` takes.
        dst_graph: the graph to copy to; the graph of the view if None.
        dst_scope: the name scope of the copies.
        src_scope: the scope that their names are relative to.
        reuse_dst_scope: whether to reuse an existing scope; otherwise a number is added
            to its name.

    Returns:
        `(sgv_, info)`: a view of the copies, and the `TransformerInfo` of the copy.

    Raises:
        ArgumentTypeError, TransformError, FinalizedGraphError: as
            `Transformer.__call__`.

    Cost: linear in the ops, at most 1.5 times that of `tf.import_graph_def` of the same
    nodes.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> view, info = ge.copy(y.op, dst_scope="copy")
        >>> info.transformed(y).name, view.inputs[0].name
        ('copy/y:0', 'copy/geph__x_0:0')
    """
    view, dst_graph = _view_and_destination(sgv, dst_graph)
    return Transformer()(view, dst_graph, dst_scope, src_scope, reuse_dst_scope)


def copy_with_input_replacements(
    sgv: Any,
    replacement_ts: Replacements,
    dst_graph: Graph | None = None,
    dst_scope: str = "",
    src_scope: str = "",
    reuse_dst_scope: bool = False,
) -> tuple[SubGraphView, TransformerInfo]:
    """Copy a view with some of its inputs replaced.

    The copy reads the other inputs itself, or placeholders for them if it is in another
    graph.

    Args:
        sgv: a view, or anything that `make_view` takes.
        replacement_ts: the tensor to read instead of each input: a mapping keyed by
            tensor or by `tensor.ref()`, or pairs. If the shape differs, dependent
            shapes are inferred again. A key that is not an input of the view is
            ignored, with a warning.
        dst_graph: the graph to copy to; the graph of the view if None.
        dst_scope: the name scope of the copies.
        src_scope: the scope that their names are relative to.
        reuse_dst_scope: whether to reuse an existing scope; otherwise a number is added
            to its name.

    Returns:
        `(sgv_, info)`: a view of the copies, and the `TransformerInfo` of the copy.

    Raises:
        ArgumentTypeError, TransformError, FinalizedGraphError: as
            `Transformer.__call__`; also for a replacement of another dtype or graph.

    Cost: as `copy`.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x, z = tf.constant(1.0, name="x"), tf.constant(2.0, name="z")
        ...     y = tf.negative(x, name="y")
        >>> _, info = ge.copy_with_input_replacements(y.op, {x.ref(): z})
        >>> info.transformed(y).op.inputs[0].name
        'z:0'
    """
    view, dst_graph = _view_and_destination(sgv, dst_graph)
    replacements = _replacements(replacement_ts)
    inputs = IdentitySet(view.inputs)
    for t in replacements:
        if t not in inputs:
            _logger.warning("'%s' is no input of %r: it is not replaced", t.name, view)
    replaced = IdentityMap((t, t_) for t, t_ in replacements.items() if t in inputs)
    return copy_replacing(
        view, replaced, dst_graph, dst_scope, src_scope, reuse_dst_scope
    )


def graph_replace(
    target_ts: Any,
    replacement_ts: Replacements,
    dst_scope: str = "",
    src_scope: str = "",
    reuse_dst_scope: bool = False,
    dst_graph: Graph | None = None,
) -> Any:
    """Return the targets, recomputed with some tensors replaced by others.

    This copies the ops between the replaced tensors and the targets; everything else is
    shared with the original, or copied too if the result is in another graph. Version 1
    while loops in between are copied as a whole, with the stacks and arrays that they
    fill, and the other users of these.

    Args:
        target_ts: a tensor, or a nested structure of tensors.
        replacement_ts: the replacement of each tensor: a mapping keyed by tensor or by
            `tensor.ref()`, or pairs.
        dst_scope: the name scope of the copies.
        src_scope: the scope that their names are relative to.
        reuse_dst_scope: whether to reuse an existing scope; otherwise a number is added
            to its name.
        dst_graph: the graph to copy to, which contains the replacements; the graph of
            the targets if None.

    Returns:
        A structure like `target_ts`; within one graph, a target that does not depend on
        a replaced tensor is returned as it is.

    Raises:
        ArgumentTypeError: a target or a key is not a tensor of a graph.
        TransformError: no target depends on a replaced tensor, or as
            `copy_with_input_replacements`.

    Cost: linear in descendants of the replaced tensors and ancestors of the targets.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x, z = tf.constant(1.0, name="x"), tf.constant(2.0, name="z")
        ...     y = tf.negative(x, name="y")
        >>> ge.graph_replace({"out": y}, {x.ref(): z})
        {'out': <tf.Tensor 'y_1:0' shape=() dtype=float32>}
    """
    targets = types.flatten(target_ts)
    for t in targets:
        types.require_tensor(t)
    replacements = _replacements(replacement_ts)
    replaced = list(replacements)
    graph = conversions.graph_of_all([*targets, *replaced])
    if graph is None:
        raise TransformError("no targets were given; pass the tensors to recompute")
    if dst_graph is None:
        dst_graph = graph
    types.require_graph(dst_graph)
    behind = walks.get_backward_walk_ops(
        targets, stop_at_ts=replaced, control_inputs=True
    )
    dependent = _dependent(graph, replaced, behind)
    if not dependent:
        raise TransformError(
            f"none of {[t.name for t in targets]} depends on any of "
            f"{[t.name for t in replaced]}; check the direction, or swap the arguments"
        )
    # A copy in another graph can read none of the originals, so all ops come along.
    needed = [op for op in behind if op in dependent or dst_graph is not graph]
    # An op that shares a stack or an array with these need not be behind a target.
    needed += adjacency.graph_order(dependent.difference(behind))
    _, info = copy_replacing(
        queries.make_view(v1_control_flow.whole_loops(graph, needed)),
        replacements,
        dst_graph,
        dst_scope,
        src_scope,
        reuse_dst_scope,
    )

    def result(t: Tensor) -> Tensor:
        replaced_by = replacements.get(t)
        # A target that is itself replaced has no copy.
        if replaced_by is not None:
            return replaced_by
        return info.transformed(t, lambda original: original)

    return types.map_leaves(target_ts, result)


def _dependent(
    graph: Graph, replaced: Sequence[Tensor], behind: Sequence[Operation]
) -> frozenset[Operation]:
    """Return the ops that compute something else once tensors are replaced."""
    # Who shares a stack or an array with such an op is among them.
    controls = ControlOutputs(graph)
    needed = frozenset(behind)
    dependents = needed.intersection(
        walks.get_forward_walk_ops(replaced, control_outputs=controls)
    )
    while True:
        states = (
            frozenset(
                v1_control_flow.step_states(
                    v1_control_flow.whole_loops(graph, dependents)
                )
            )
            - dependents
        )
        if not states:
            return dependents
        ahead = walks.get_forward_walk_ops(states, control_outputs=controls)
        dependents |= states | needed.intersection(ahead)


def _view_and_destination(
    sgv: Any, dst_graph: Graph | None
) -> tuple[SubGraphView, Graph]:
    view = queries.make_view(sgv)
    if dst_graph is None:
        dst_graph = view.graph
        if dst_graph is None:
            raise TransformError("the view is empty; select ops to copy")
    types.require_graph(dst_graph)
    return view, dst_graph


def _replacements(replacements: Replacements) -> IdentityMap[Tensor]:
    pairs = replacements.items() if isinstance(replacements, Mapping) else replacements
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ArgumentTypeError(
                "expected a mapping from tensor to tensor, or pairs of tensors, got "
                f"{types.type_name(pair)}"
            )
        # A tensor cannot be the key of a dict, but its `ref()` can.
        key = types.dereference(pair[0])
        types.require_tensor(key)
        types.require_tensor(pair[1])
        checked.append((key, pair[1]))
    return IdentityMap(checked)
