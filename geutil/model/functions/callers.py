"""Ops that call functions, made anew with other arguments or results.

TensorFlow cannot change the number of an op's inputs or outputs. So a new op takes the
place of the old one, which stays in the graph with nobody reading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph.adjacency import (
    consumers,
    control_flow_context,
    control_inputs,
    control_outputs,
    input_indices,
)
from geutil.graph.contexts import set_context
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.function_calls import Caller, renamed_node
from geutil.graph.importing import add_control_edges, make_op
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.names import absolute_unique_name
from geutil.graph.placeholders import copy_handle_data


@dataclass(frozen=True)
class NewOutput:
    """An output of the new op.

    Attributes:
        like: the tensor whose dtype, shape and, for a resource, handle it has.
        old: the index of the output of the old op whose place it takes, if any.
    """

    like: Tensor
    old: int | None = None


@dataclass(frozen=True)
class Rebuild:
    """What the op that takes a caller's place looks like.

    Attributes:
        inputs: all of its inputs.
        outputs: all of its outputs.
        stand_ins: what is read instead of outputs of the old op that are gone.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[NewOutput]
    stand_ins: Mapping[int, Tensor] = field(default_factory=dict)


def same_ends(caller: Caller) -> Rebuild:
    """Return the inputs and outputs of a caller as they are."""
    op = caller.op
    outputs = [NewOutput(t, index) for index, t in enumerate(op.outputs)]
    return Rebuild(list(op.inputs), outputs)


def replace_caller(
    caller: Caller, names: Mapping[str, str], rebuild: Rebuild
) -> Operation:
    """Put a new op in the place of a caller, and return it.

    Args:
        caller: the old op.
        names: the new names of functions that it calls.
        rebuild: the inputs and outputs of the new op.

    Cost: linear in the edges of the op.
    """
    old = caller.op
    graph = old.graph
    node = renamed_node(caller, names)
    _set_types(node, caller, rebuild)
    node.name = absolute_unique_name(graph, old.name)
    new = make_op(graph, node, rebuild.inputs)
    set_context(new, control_flow_context(old))
    add_control_edges(new, control_inputs(old))
    stand_ins = dict(rebuild.stand_ins)
    for output, t in zip(rebuild.outputs, new.outputs, strict=True):
        copy_handle_data(output.like, t)
        t.set_shape(output.like.shape)
        if output.old is not None:
            stand_ins[output.old] = t
    inputs = [
        InputEdit(reader, place, stand_ins[index])
        for index, t in enumerate(old.outputs)
        if index in stand_ins
        for reader in consumers(t)
        for place in input_indices(reader, t)
    ]
    waiting = [
        ControlEdit(op, tuple(new if c is old else c for c in control_inputs(op)))
        for op in control_outputs(old)
    ]
    apply_edits(graph, inputs, waiting)
    return new


def _set_types(node: Any, caller: Caller, rebuild: Rebuild) -> None:
    """Write dtypes and shapes of the inputs and outputs into a node."""
    types_in = [t.dtype.as_datatype_enum for t in rebuild.inputs]
    types_out = [o.like.dtype.as_datatype_enum for o in rebuild.outputs]
    if caller.is_loop:
        _set_list(node, "T", "type", types_in)
        if "_num_original_outputs" in node.attr:
            node.attr["_num_original_outputs"].i = len(types_out)
    elif caller.callees[0].attribute:
        _set_list(node, "Tin", "type", types_in[caller.first_argument :])
        _set_list(node, "Tout", "type", types_out)
    # Reading an attribute that is not there would make one.
    if "output_shapes" in node.attr and node.attr["output_shapes"].list.shape:
        known = list(node.attr["output_shapes"].list.shape)
        shapes = [
            o.like.shape.as_proto() if o.old is None else known[o.old]
            for o in rebuild.outputs
        ]
        _set_list(node, "output_shapes", "shape", shapes)


def _set_list(node: Any, name: str, kind: str, values: Sequence[Any]) -> None:
    value = tf.compat.v1.AttrValue()
    value.list.SetInParent()  # An empty list is a list as well.
    getattr(value.list, kind).extend(values)
    node.attr[name].CopyFrom(value)
