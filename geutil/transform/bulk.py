"""Copying ops in bulk: one `GraphDef`, one import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from geutil.errors import TransformError
from geutil.graph.adjacency import control_inputs
from geutil.graph.importing import (
    BULK_LIMIT,
    graph_def_of,
    import_ops,
    neutral,
    new_graph,
    set_device,
)
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.names import absolute_unique_names
from geutil.graph.order import topological_sort
from geutil.graph.placeholders import make_placeholder_from_tensor
from geutil.graph.shapes import same_static_shape
from geutil.transform.nodes import adapt_node
from geutil.transform.state import TransformState

OutsideHandler = Callable[[Tensor], Tensor]
NodeFunction = Callable[[Any], Any]


def copy_ops_in_bulk(
    info: TransformState,
    transform_outside: OutsideHandler,
    keep_control_inputs: bool,
    nodedef_fn: NodeFunction | None,
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
    graph_def = graph_def_of(info.graph, ops)
    if graph_def.ByteSize() > BULK_LIMIT:
        return False
    # The importer itself puts a scope before every name. But where a name is taken, it
    # may choose that of another copy, and the definition of a loop edge then names the
    # op that bore the name before.
    renamed = (
        bool(info.scope or info.reuses_scope)
        or nodedef_fn is not None
        or _has_loop(graph_def)
    )
    inputs = _Inputs(info, _new_names(info, ops) if renamed else None)
    for op, node_def in zip(ops, graph_def.node, strict=True):
        adapt_node(info, op, node_def)
        inputs.connect(op, node_def, keep_control_inputs)
        if renamed:
            node_def.name = inputs.name(op)
        if nodedef_fn is not None:
            node_def.CopyFrom(nodedef_fn(node_def))
    if _may_be_refused(info):
        _rehearse(info, graph_def, inputs.outside)
    if nodedef_fn is not None:
        info.altered_ops += ops
    input_map = {name: transform_outside(t) for name, t in inputs.outside.items()}
    scope_ = "" if renamed else info.scope_
    ops_ = _import(info.graph_, graph_def, input_map, scope_)
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


def _import(
    graph: Graph, graph_def: Any, input_map: Mapping[str, Tensor], scope: str = ""
) -> list[Operation]:
    try:
        return import_ops(graph, graph_def, input_map, scope)
    except Exception as error:
        raise TransformError(f"TensorFlow refuses the copy: {error}") from error


def _may_be_refused(info: TransformState) -> bool:
    """Tell whether a shape may be refused when placeholders have been made already."""
    return not info.same_graph and any(
        not same_static_shape(t, t_) for t, t_ in info.replacements.items()
    )


def _rehearse(
    info: TransformState, graph_def: Any, outside: Mapping[str, Tensor]
) -> None:
    """Import into a graph that is thrown away: a refusal leaves nothing behind."""
    rehearsal = type(graph_def)()
    rehearsal.CopyFrom(graph_def)
    rehearsal.library.CopyFrom(info.graph_.as_graph_def().library)
    graph = new_graph()
    with neutral(graph):
        input_map = {
            name: make_placeholder_from_tensor(info.replacements.get(t, t), scope="")
            for name, t in outside.items()
        }
    _import(graph, rehearsal, input_map)


def _has_loop(graph_def: Any) -> bool:
    return any("NextIteration" in node.op for node in graph_def.node)


def _new_names(info: TransformState, ops: Sequence[Operation]) -> dict[Operation, str]:
    wanted = [info.new_name(op.name) for op in ops]
    names = absolute_unique_names(info.graph_, wanted)
    return dict(zip(ops, names, strict=True))


class _Inputs:
    """The inputs of the nodes: names of other nodes, or of tensors from outside.

    Attributes:
        outside: the tensor of the source graph that each name from outside means.
    """

    def __init__(
        self, info: TransformState, names: dict[Operation, str] | None
    ) -> None:
        self._members = info.ops
        self._loose_controls = info.loose_controls
        self._replaced = info.replacements
        self._names = names
        self._references: dict[int, str] = {}
        self.outside: dict[str, Tensor] = {}

    def name(self, op: Operation) -> str:
        """Return the name that the node of `op` bears in the import."""
        name: str = op.name if self._names is None else self._names[op]
        return name

    def connect(
        self,
        op: Operation,
        node_def: Any,
        keep_control_inputs: bool,
    ) -> None:
        """Set the inputs of a node, which still are those of the original."""
        tensors = op.inputs
        for index, t in enumerate(tensors):
            if t.op not in self._members or (self._replaced and t in self._replaced):
                node_def.input[index] = self._outside_name(t)
            elif self._names is not None:
                node_def.input[index] = f"{self._names[t.op]}:{t.value_index}"
        if len(node_def.input) > len(tensors):
            del node_def.input[len(tensors) :]
            controls = control_inputs(op)
            kept = [c for c in controls if c in self._members and keep_control_inputs]
            node_def.input.extend(f"^{self.name(control)}" for control in kept)
            if len(kept) < len(controls):
                self._loose_controls.append(op)

    def _outside_name(self, t: Tensor) -> str:
        reference = self._references.get(id(t))
        if reference is None:
            reference = f"geutil_outside:{len(self.outside)}"
            self._references[id(t)] = reference
            self.outside[reference] = t
        return reference
