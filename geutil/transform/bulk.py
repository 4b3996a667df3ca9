"""Copying ops in bulk: one `GraphDef`, one import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from geutil.errors import TransformError
from geutil.graph.importing import (
    BULK_LIMIT,
    import_ops,
    new_graph_def,
    set_device,
)
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.names import absolute_unique_names
from geutil.graph.order import topological_sort
from geutil.transform.nodes import copied_node
from geutil.transform.state import TransformState

_BOUNDARY = "geutil_boundary"

OutsideHandler = Callable[[Tensor], Tensor]


def copy_ops_in_bulk(
    info: TransformState,
    transform_outside: OutsideHandler,
    keep_control_inputs: bool,
    nodedef_fn: Callable[[Any], Any] | None,
) -> bool:
    """Copy all ops of the view at once.

    Args:
        info: the running transformation; its maps are filled.
        transform_outside: gives the tensor that stands for one from outside the view.
        keep_control_inputs: whether control edges between the ops are copied.
        nodedef_fn: changes the `NodeDef` of each copy before the op is made.

    Returns:
        False, with nothing done, when the ops do not fit into one protobuf.

    Raises:
        TransformError: TensorFlow refuses the nodes, for example because a replacement
            has a shape that an op cannot take.

    Cost: at most half as much again as `tf.import_graph_def` of the same nodes.
    """
    ops = topological_sort(info.sgv.ops)
    wanted = [info.new_name(op.name) for op in ops]
    names = dict(zip(ops, absolute_unique_names(info.graph_, wanted), strict=True))
    graph_def = new_graph_def(info.graph)
    for op in ops:
        node_def = copied_node(info, op, names[op])
        if nodedef_fn is not None:
            node_def = nodedef_fn(node_def)
        graph_def.node.append(node_def)
    if graph_def.ByteSize() > BULK_LIMIT:
        return False
    input_map = _connect(info, ops, names, graph_def.node, transform_outside)
    if keep_control_inputs:
        for op, node_def in zip(ops, graph_def.node, strict=True):
            node_def.input.extend(
                f"^{names[control]}"
                for control in op.control_inputs
                if control in names
            )
    try:
        ops_ = import_ops(info.graph_, graph_def, input_map)
    except Exception as error:
        raise TransformError(f"TensorFlow refuses the copy: {error}") from error
    for op_, node_def in zip(ops_, graph_def.node, strict=True):
        if node_def.device:
            # The importer writes a device in its own spelling.
            set_device(op_, node_def.device)
    info.copied.update(zip(ops, ops_, strict=True))
    info.transformed_ops.update(info.copied)
    info.transformed_ts.update(
        pair
        for op, op_ in info.copied.items()
        for pair in zip(op.outputs, op_.outputs, strict=True)
    )
    return True


def _connect(
    info: TransformState,
    ops: Iterable[Operation],
    names: dict[Operation, str],
    nodes: Iterable[Any],
    transform_outside: OutsideHandler,
) -> dict[str, Tensor]:
    """Name the inputs of the nodes and return what the names from outside stand for."""
    input_map: dict[str, Tensor] = {}
    references: dict[int, str] = {}
    for op, node_def in zip(ops, nodes, strict=True):
        for t in op.inputs:
            reference = references.get(id(t))
            if reference is None:
                name = names.get(t.op)
                if name is None or t in info.replacements:
                    reference = f"{_BOUNDARY}:{len(input_map)}"
                    input_map[reference] = transform_outside(t)
                else:
                    reference = f"{name}:{t.value_index}"
                references[id(t)] = reference
            node_def.input.append(reference)
    return input_map
