"""Handlers.

Decisions of a transformer about an op, a tensor, a control input, and the copy's node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from geutil.graph import call_graph, colocation, creation, gradient_functions, types
from geutil.graph.types import Element, Operation, Tensor
from geutil.transform.custom_gradients import copied_gradient
from geutil.transform.state import TransformState

_FRAME = "frame_name"


def adapt_node(info: TransformState, op: Operation, node_def: Any) -> None:
    """Turn the definition of `op` into that of its copy; name and inputs stay.

    Attributes and device are the original's, except that frames of version 1 loops,
    bodies of version 2 loops and closures of `tf.custom_gradient` become the copy's
    own, and colocation is left for `finishing`, when the copies exist.
    """
    attributes = node_def.attr
    if colocation.ATTRIBUTE in attributes:
        info.colocated[op] = list(attributes[colocation.ATTRIBUTE].list.s)
        del attributes[colocation.ATTRIBUTE]
    if _FRAME in attributes:
        frame = attributes[_FRAME].s.decode()
        attributes[_FRAME].s = info.context_names.get(frame, frame).encode()
    if gradient_functions.ATTRIBUTE in attributes:
        gradient = attributes[gradient_functions.ATTRIBUTE].s.decode()
        if gradient_functions.is_closure(gradient):
            copied = copied_gradient(info, op, gradient)
            attributes[gradient_functions.ATTRIBUTE].s = copied.encode()
    if info.function_names:
        call_graph.rename_functions(node_def, info.function_names)


def replace_t_with_placeholder_handler(info: TransformState, t: Tensor) -> Tensor:
    """Return a new placeholder in the destination that stands in for `t`.

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
    """Copy an op, with other inputs.

    The default for ops. A transformer whose `transform_op_handler` is this function,
    or a `functools.partial` of it, copies in bulk; with any other handler it goes op
    by op, six times as slow.

    Args:
        info: the running transformation.
        op: an op of the source graph.
        new_inputs: the inputs of the copy.
        copy_shape: whether static shapes are copied even where shape inference on
            other inputs says otherwise.
        nodedef_fn: changes the `NodeDef` of the copy before the op is made, and
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
    adapt_node(info, op, node_def)
    node_def.name = name
    if nodedef_fn is not None:
        node_def = nodedef_fn(node_def)
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
