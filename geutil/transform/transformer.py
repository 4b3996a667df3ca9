"""The transformer: copies a view, and asks a handler for each decision.

Handlers decide about ops, tensors, control inputs, and the collections of copies.
`copy` and `copy_with_input_replacements` take any selection of ops.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from geutil.errors import ArgumentTypeError, FinalizedGraphError, TransformError
from geutil.graph import adjacency, creation, resource_variables, types, v1_control_flow
from geutil.graph.types import Element, Graph, IdentityMap, Operation, Tensor
from geutil.graph.v1_control_flow import ContextMembers
from geutil.select import queries, selections, walks
from geutil.select.queries import make_view
from geutil.select.subgraph import SubGraphView
from geutil.select.walks import ControlOutputs
from geutil.transform import op_copies
from geutil.transform.state import TransformerInfo, TransformState


def replace_t_with_placeholder_handler(info: TransformState, t: Tensor) -> Tensor:
    """Return a new placeholder in the destination that replaces `t`.

    The default for the inputs of the view.

    Args:
        info: the running transformation.
        t: a tensor of the source graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> transformer = ge.Transformer()
        >>> transformer.transform_external_input_handler = (
        ...     ge.replace_t_with_placeholder_handler
        ... )
        >>> transformer(y.op, graph, "c")[0].inputs[0].name
        'c/geph__x_0:0'
    """
    with creation.neutral(info.graph_):
        return creation.make_placeholder_from_tensor(t, scope=info.scope_)


def keep_t_if_possible_handler(info: TransformState, t: Tensor) -> Tensor:
    """Return `t` itself within one graph, and a new placeholder otherwise.

    The default for hidden inputs of the view.

    Args:
        info: the running transformation.
        t: a tensor of the source graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> transformer = ge.Transformer()
        >>> transformer.transform_external_input_handler = ge.keep_t_if_possible_handler
        >>> transformer(y.op, graph, "c")[0].inputs[0].name
        'x:0'
    """
    return t if info.same_graph else replace_t_with_placeholder_handler(info, t)


def assign_renamed_collections_handler(
    info: TransformState, elem: Element, elem_: Element
) -> None:
    """Add `elem_` to the collections of `elem`.

    Collections that TensorFlow gives a meaning (`tf.compat.v1.GraphKeys`) keep their
    name; the name of any other moves to the destination scope.

    Args:
        info: the running transformation.
        elem: an op or tensor of the source graph.
        elem_: its copy.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> graph.add_to_collection("mine", x)
        >>> transformer = ge.Transformer()
        >>> transformer.assign_collections_handler = (
        ...     ge.assign_renamed_collections_handler
        ... )
        >>> _ = transformer(x.op, graph, "c")
        >>> graph.get_collection("c/mine")
        [<tf.Tensor 'c/x:0' shape=() dtype=float32>]
    """
    for name in info.collection_names(elem):
        info.graph_.add_to_collection(name, elem_)


def transform_op_if_inside_handler(
    info: TransformState, op: Operation | None, keep_if_possible: bool = True
) -> Operation | None:
    """Return the copy of an op of the view; of another op, itself or None.

    The default for control inputs and original ops.

    Args:
        info: the running transformation.
        op: an op of the source graph, or None.
        keep_if_possible: whether an op outside the view is kept within one graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     with tf.control_dependencies([x]):
        ...         y = tf.constant(2.0, name="y")
        >>> transformer = ge.Transformer()
        >>> transformer.transform_control_input_handler = (
        ...     ge.transform_op_if_inside_handler
        ... )
        >>> [op.name for op in transformer(y.op, graph, "c")[0].ops[0].control_inputs]
        ['x']
    """
    if op is None:
        return None
    if op in info.ops:
        return info.transformed_ops.get(op)
    return op if keep_if_possible and info.same_graph else None


def copy_op_handler(
    info: TransformState,
    op: Operation,
    new_inputs: Sequence[Tensor],
    copy_shape: bool = False,
    nodedef_fn: Callable[[Any], Any] | None = None,
) -> tuple[Operation, list[Tensor]]:
    """Copy an op with new inputs.

    The default for ops. A transformer whose `transform_op_handler` is this function,
    or a `functools.partial` of it, copies in bulk; with any other handler it copies op
    by op, six times as slow.

    Args:
        info: the running transformation.
        op: an op of the source graph.
        new_inputs: the inputs of the copy.
        copy_shape: whether to copy static shapes even if shape inference on the new
            inputs gives others.
        nodedef_fn: changes the `NodeDef` of the copy before the op is created, and
            returns it.

    Returns:
        `(op_, outputs_)`.

    Example:
        >>> import functools
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> def on_gpu(node_def):
        ...     node_def.device = "/device:GPU:0"
        ...     return node_def
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> transformer = ge.Transformer()
        >>> transformer.transform_op_handler = functools.partial(
        ...     ge.copy_op_handler, nodedef_fn=on_gpu
        ... )
        >>> view, _ = transformer(graph, graph, "copy")
        >>> view.ops[0].device
        '/device:GPU:0'
    """
    name = types.absolute_unique_name(info.graph_, info.new_name(op.name))
    node_def = op.node_def
    op_copies.adapt_node(info, op, node_def)
    node_def.name = name
    if nodedef_fn is not None:
        node_def = nodedef_fn(node_def)
        # The shapes of the original may not hold for a node that a caller altered.
        info.altered_ops.append(op)
    op_ = creation.make_op(info.graph_, node_def, new_inputs)
    if copy_shape:
        copy_shapes(op, op_)
    info.copied[op] = op_
    return op_, op_.outputs


def copy_shapes(op: Operation, op_: Operation) -> None:
    """Give the outputs of `op_` the static shapes of those of `op`."""
    for t, t_ in zip(op.outputs, op_.outputs, strict=True):
        t_.set_shape(t.shape)


class Transformer:
    """Transforms a view into new ops.

    By default it copies the ops and replaces the inputs by placeholders. Each decision
    can be changed by setting an attribute.

    Attributes:
        transform_op_handler: `(info, op, new_inputs) -> (op_, outputs_)` creates an op.
            While it is `copy_op_handler`, or a `functools.partial` of it, ops are
            copied in bulk.
        transform_external_input_handler: `(info, t) -> t_` for an input of the view.
        transform_external_hidden_input_handler: `(info, t) -> t_` for a tensor from
            outside that is not among the inputs.
        transform_control_input_handler: `(info, op) -> op_ or None`.
        transform_original_op_handler: `(info, op) -> op_ or None` for the op that a
            gradient op differentiates.
        assign_collections_handler: `(info, elem, elem_) -> None`.
        replacements: tensors to read instead of others, wherever these come from,
            without calling a handler.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> transformer = ge.Transformer()
        >>> transformer.transform_external_input_handler = lambda info, t: t
        >>> view, info = transformer(y.op, graph, "copy")
        >>> info.transformed(y).op.inputs[0].name
        'x:0'
    """

    def __init__(self) -> None:
        # The defaults are those of tf.contrib.graph_editor.
        self.transform_op_handler: Any = copy_op_handler
        self.transform_control_input_handler: Any = transform_op_if_inside_handler
        self.assign_collections_handler: Any = assign_renamed_collections_handler
        self.transform_external_input_handler: Any = replace_t_with_placeholder_handler
        self.transform_external_hidden_input_handler: Any = keep_t_if_possible_handler
        self.transform_original_op_handler: Any = transform_op_if_inside_handler
        self.replacements: IdentityMap[Tensor] = IdentityMap()

    def __call__(
        self,
        sgv: Any,
        dst_graph: Graph,
        dst_scope: str,
        src_scope: str = "",
        reuse_dst_scope: bool = False,
    ) -> tuple[SubGraphView, TransformerInfo]:
        """Transform a view.

        Args:
            sgv: a view, or anything that `make_view` takes.
            dst_graph: the graph that the new ops go to.
            dst_scope: their name scope.
            src_scope: the scope that their names are relative to: with "a" and
                dst_scope "b", "a/x" becomes "b/x".
            reuse_dst_scope: whether a scope that exists is used as it is; otherwise it
                gets a number.

        Returns:
            `(sgv_, info)`: a view of the new ops whose inputs and outputs are in the
            order of those of `sgv`, and a `TransformerInfo`.

        Raises:
            ArgumentTypeError: `sgv` makes no view, or `dst_graph` is no graph.
            TransformError: an op lies outside `src_scope`, part of a version 1 loop is
                missing or would read a replacement that lives outside, a handler
                returned a wrong type, or TensorFlow refuses.
            FinalizedGraphError: `dst_graph` is finalized.

        Cost: linear in the ops; copied in bulk, at most half as much again as
        `tf.import_graph_def` of the same nodes.
        """
        view = make_view(sgv)
        types.require_graph(dst_graph)
        if dst_graph.finalized:
            raise FinalizedGraphError("dst_graph is finalized; pass another graph")
        if view.graph is None:
            raise TransformError("the view is empty; select ops to copy")
        info = TransformState(
            view,
            dst_graph,
            types.scope_finalize(dst_scope),
            types.scope_finalize(src_scope),
            copy_replacing,
        )
        info.transform_original_op_handler = self.transform_original_op_handler
        # A refusal has to come before anything is named or made.
        whole_contexts = self._check(info)
        if info.scope_ and not reuse_dst_scope:
            scope_ = types.absolute_unique_name(dst_graph, info.scope_[:-1])
            info.scope_ = types.scope_finalize(scope_)
            info.reuses_scope = False
        op_copies.name_contexts(info, whole_contexts)
        op_copies.carry_functions(info)
        self._transform_ops(info)
        op_copies.finish_copies(info)
        op_copies.connect_control_inputs(
            info, self.transform_control_input_handler, info.loose_controls
        )
        # Contexts name their ops: the copies of these have to be there.
        op_copies.copy_contexts(info, whole_contexts)
        self._assign_collections(info)
        return _transformed_view(info), TransformerInfo(info)

    def _check(self, info: TransformState) -> list[ContextMembers]:
        """Make the checks that need no name; return whole contexts."""
        if info.scope:
            for op in info.sgv.ops:
                info.new_name(op.name)
        whole = op_copies.whole_contexts(info)
        info.replacements = IdentityMap(
            (t, _checked(info, t, t_)) for t, t_ in self.replacements.items()
        )
        op_copies.check_replacements(info, whole)
        return whole

    @property
    def _control_inputs_are_copied(self) -> bool:
        return self.transform_control_input_handler is transform_op_if_inside_handler

    def _transform_ops(self, info: TransformState) -> None:
        """Make the new ops, in bulk where that is possible."""
        handler: Any = self.transform_op_handler
        outside = functools.partial(self._transform_outside, info)
        options: dict[str, Any] = {}
        # Such a partial adds nothing but options, which a bulk copy can follow.
        if type(handler) is functools.partial and not handler.args:
            handler, options = handler.func, dict(handler.keywords)
        if handler is copy_op_handler:
            copy_shape = options.pop("copy_shape", False)
            nodedef_fn = options.pop("nodedef_fn", None)
            # An option that is left is unknown: the handler itself refuses it.
            if not options and op_copies.copy_ops_in_bulk(
                info, outside, self._control_inputs_are_copied, nodedef_fn
            ):
                if copy_shape:
                    for op, op_ in info.copied.items():
                        copy_shapes(op, op_)
                return
        op_copies.transform_ops_one_by_one(info, outside, self.transform_op_handler)

    def _transform_outside(self, info: TransformState, t: Tensor) -> Tensor:
        """Return the replacement of a tensor from outside; asked once for each."""
        t_ = info.replacements.get(t)
        if t_ is None:
            t_ = info.transformed_ts.get(t)
        if t_ is None:
            if t in info.sgv_inputs_set:
                t_ = self.transform_external_input_handler(info, t)
            else:
                t_ = self.transform_external_hidden_input_handler(info, t)
            t_ = _checked(info, t, t_)
        # A replaced tensor of the view has a copy, which is not to be hidden.
        if t.op not in info.ops and t not in info.transformed_ts:
            info.outside_ts.append(t)
            info.transformed_ts[t] = t_
        return t_

    def _assign_collections(self, info: TransformState) -> None:
        assign = self.assign_collections_handler
        if assign is assign_renamed_collections_handler:
            if not info.same_graph:
                resource_variables.carry_variables(
                    info.graph, info.graph_, info.copied_name, info.collection_name
                )
            # Without collections, the walk over all ops would find nothing.
            if not info.collections:
                return
        for op, op_ in info.transformed_ops.items():
            assign(info, op, op_)
            for t in op.outputs:
                t_ = info.transformed_ts.get(t)
                if t_ is not None:
                    assign(info, t, t_)


def copy_replacing(
    view: SubGraphView,
    replacements: IdentityMap[Tensor],
    dst_graph: Graph,
    dst_scope: str,
    src_scope: str,
    reuse_dst_scope: bool,
    *,
    keep_control_inputs: bool = True,
) -> tuple[SubGraphView, TransformerInfo]:
    """Copy a view, reading other tensors in place of some, wherever these come from."""
    copier = Transformer()
    if not keep_control_inputs:
        copier.transform_control_input_handler = lambda info, op: None
    # The default would put placeholders in the place of tensors that can be read.
    copier.transform_external_input_handler = keep_t_if_possible_handler
    copier.replacements = replacements
    return copier(view, dst_graph, dst_scope, src_scope, reuse_dst_scope)


def _checked(info: TransformState, t: Tensor, t_: Any) -> Tensor:
    """Refuse a stand-in that cannot be read where `t` was."""
    if not types.is_tensor(t_):
        raise TransformError(
            f"{types.type_name(t_)} cannot stand in for '{t.name}'; pass a tf.Tensor"
        )
    # A reference to a variable and its value are read alike.
    if t_.dtype.base_dtype != t.dtype.base_dtype:
        raise TransformError(
            f"'{t_.name}' ({t_.dtype.name}) cannot stand in for '{t.name}' "
            f"({t.dtype.name}); cast first with tf.cast"
        )
    if t_.graph is info.graph_:
        return t_
    if types.is_func_graph(info.graph_):
        return creation.capture(info.graph_, t_)
    raise TransformError(
        f"'{t_.name}' cannot stand in for '{t.name}': it is in another graph than the "
        "copy; make it in dst_graph"
    )


def _transformed_view(info: TransformState) -> SubGraphView:
    """Return a view of the new ops, inputs and outputs in the order of the old ones."""
    new_ops = frozenset(info.transformed_ops.values())
    inputs = [info.transformed_ts.get(t) for t in info.sgv.inputs]
    outputs = [info.transformed_ts.get(t) for t in info.sgv.outputs]
    return SubGraphView.from_parts(
        info.graph_,
        ops=[info.transformed_ops[op] for op in info.sgv.ops],
        inputs=types.unique(
            t_ for t_ in inputs if t_ is not None and t_.op not in new_ops
        ),
        outputs=[t_ for t_ in outputs if t_ is not None and t_.op in new_ops],
    )


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
    inputs = types.IdentitySet(view.inputs)
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
    graph = selections.graph_of_all([*targets, *replaced])
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
