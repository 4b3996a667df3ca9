"""Copies of ops made by `tf.custom_gradient` that have a gradient of their own.

Such an op's gradient is a Python closure over tensors of the original's graph. Left
alone, the gradient of a copy would be computed from the original's tensors: wrong as
soon as the copy has other inputs, impossible when it lies in another graph. So a copy
gets a gradient that traces the closure in a graph of its own and carries the traced ops
over with every captured tensor replaced by its copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import gradient_registry
from geutil.graph.identity import IdentityMap, MutableIdentityMap
from geutil.graph.importing import capture
from geutil.graph.kinds import Graph, Operation, Tensor, is_func_graph, is_tensor
from geutil.graph.names import scope_finalize
from geutil.graph.state import state_of
from geutil.select.views import make_view
from geutil.transform.state import TransformState


def copied_gradient(info: TransformState, op: Operation, gradient: str) -> str:
    """Register the gradient for a copy of `op` and return its name.

    Args:
        info: the running transformation; its tensors are looked up when the gradient
            is built, by which time all of them are known.
        op: an op whose `_gradient_op_type` is `gradient`.
        gradient: the name of a closure in the registry.
    """
    source = info.graph

    def gradient_of_copy(op_: Operation, *grads_: Tensor | None) -> list[Any]:
        graph_ = tf.compat.v1.get_default_graph()
        copies = _copies_for(op_)
        body = gradient_registry.new_body("copied_gradient")
        with body.as_default():
            stand_ins = [None if g is None else _stand_in(g) for g in grads_]
            results = gradient_registry.lookup(gradient)(op, *stand_ins)
        results = list(results) if isinstance(results, list | tuple) else [results]
        inputs: MutableIdentityMap[Tensor] = MutableIdentityMap()
        for stand_in, grad in zip(stand_ins, grads_, strict=True):
            if stand_in is not None:
                inputs[stand_in] = grad
        for outside, inside in gradient_registry.captures_of(body):
            inputs[inside] = _copy_of(outside, copies, source, graph_, op_)
        carried = _carry_over(body, inputs, graph_)

        def final(leaf: Any) -> Any:
            if not is_tensor(leaf):
                return leaf
            if leaf.graph is body:
                return carried[leaf]
            return _copy_of(leaf, copies, source, graph_, op_)

        flat = tf.nest.flatten(results, expand_composites=True)
        mapped = tf.nest.pack_sequence_as(
            results, [final(leaf) for leaf in flat], expand_composites=True
        )
        return list(mapped)

    name = gradient_registry.register(gradient_of_copy)
    # The registry lives as long as the process. The tensors hang on the destination
    # graph instead of on the closure, so that the graph can die before.
    state_of(info.graph_).gradient_copies[name] = info.transformed_ts
    return name


def _copies_for(op_: Operation) -> Mapping[Any, Tensor]:
    name = op_.get_attr(gradient_registry.ATTRIBUTE).decode()
    copies: Mapping[Any, Tensor] | None = state_of(op_.graph).gradient_copies.get(name)
    if copies is None:
        raise TransformError(
            f"the gradient of '{op_.name}' was made for a copy in another graph; copy "
            "that graph with geutil.copy instead of importing its GraphDef"
        )
    return copies


def _stand_in(grad: Tensor) -> Tensor:
    return tf.compat.v1.placeholder(grad.dtype, grad.shape)


def _copy_of(
    outside: Any,
    copies: Mapping[Any, Tensor],
    source: Graph,
    graph_: Graph,
    op_: Operation,
) -> Tensor:
    """Return the tensor that stands in `graph_` for one that the closure reads."""
    if not is_tensor(outside):
        with graph_.as_default():
            return tf.convert_to_tensor(outside)
    copy = copies.get(outside)
    if copy is None:
        if outside.graph is source and op_.graph is not source:
            raise TransformError(
                f"the gradient of '{op_.name}' reads '{outside.name}', which was not "
                "copied with it; copy the ops that make it too"
            )
        copy = outside
    if copy.graph is not graph_ and is_func_graph(graph_):
        return capture(graph_, copy)
    return copy


def _carry_over(
    body: Graph, inputs: IdentityMap[Tensor], graph_: Graph
) -> IdentityMap[Tensor]:
    """Copy the ops of `body` into `graph_` and return the copies of its tensors."""
    from geutil.transform.copying import copy_replacing

    stand_ins = {t.op for t in inputs}
    ops = [op for op in body.get_operations() if op not in stand_ins]
    carried = MutableIdentityMap(inputs.items())
    if ops:
        scope = scope_finalize(graph_.get_name_scope())
        _, info = copy_replacing(
            make_view(ops), inputs, graph_, scope, "", reuse_dst_scope=True
        )
        for t, t_ in info._transformed_ts.items():
            carried[t] = t_
    return carried
