"""The part of a graph that runs when something is asked of it, as a `GraphDef`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph._tf import get_resource_handle_data
from geutil.graph.adjacency import graph_order
from geutil.graph.identity import IdentitySet
from geutil.graph.importing import graph_def_of
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import PLACEHOLDERS
from geutil.graph.protos import AttrValue


def step_ops(
    fetches: Iterable[Operation],
    feeds: IdentitySet,
    *,
    without: Collection[Operation] = (),
) -> list[Operation]:
    """Return the ops that run for `fetches`, in graph order.

    Args:
        fetches: the ops that are asked for.
        feeds: the tensors that are given, so that nothing behind them runs.
        without: ops that are taken to wait for nothing but what they read.

    Cost: linear in the ops and edges behind the fetches.
    """
    found = dict.fromkeys(fetches)
    waiting = list(found)
    while waiting:
        op = waiting.pop()
        behind = [t.op for t in op.inputs if t not in feeds]
        awaited = () if op in without else op.control_inputs
        for needed in (*behind, *awaited):
            if needed not in found:
                found[needed] = None
                waiting.append(needed)
    return graph_order(found)


def step_graph_def(
    graph: Graph, ops: Sequence[Operation], feeds: Iterable[Tensor]
) -> Any:
    """Return a `GraphDef` of ops that stands alone and computes what they do.

    A placeholder stands in the place of a tensor that is fed, and a variable in the
    place of a handle that a function captures. Colocation is left out.

    Args:
        graph: the graph of the ops.
        ops: from `step_ops`.
        feeds: the tensors that are given.

    Cost: linear in the ops.
    """
    graph_def = graph_def_of(graph, ops)
    graph_def.library.CopyFrom(graph.as_graph_def().library)
    fed = {_reference(t): t for t in feeds if t.op.type not in PLACEHOLDERS}
    stand_ins = {name: _stand_in(graph_def, t) for name, t in fed.items()}
    for node, op in zip(graph_def.node, ops, strict=False):
        if stand_ins:
            for i, name in enumerate(node.input):
                # An op whose inputs were set anew writes a first output with its index.
                node.input[i] = stand_ins.get(name.removesuffix(":0"), name)
        if op.type in PLACEHOLDERS and op.outputs[0].dtype == tf.resource:
            _make_variable(node, op.outputs[0])
    return graph_def


def _reference(tensor: Tensor) -> str:
    """Return how a node names the tensor among its inputs."""
    name = tensor.op.name
    return f"{name}:{tensor.value_index}" if tensor.value_index else name


def _stand_in(graph_def: Any, tensor: Tensor) -> str:
    name = f"{tensor.op.name}_fed_{tensor.value_index}"
    node = graph_def.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    return name


def _make_variable(node: Any, handle: Tensor) -> None:
    """Turn the placeholder of a captured handle into a variable's own op."""
    data = get_resource_handle_data(handle)
    behind = list(data.shape_and_type) if data is not None and data.is_set else []
    if len(behind) != 1:
        return
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].CopyFrom(AttrValue(type=behind[0].dtype))
    node.attr["shape"].shape.CopyFrom(behind[0].shape)
    node.attr["shared_name"].s = node.name.encode()
