"""Carrying a plan out: a graph and its functions with the new batch size."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph.op_types import ENTERS, SWITCHES
from geutil.model.batching.edits import (
    BiasToAdd,
    Broadcast,
    CallAnew,
    Edit,
    Plan,
    SetAttribute,
    SetConstant,
    SetDims,
    SetElements,
)
from geutil.model.batching.writing import Writer
from geutil.model.programs.program import node_of

_numbers = itertools.count()
_FRAMES = ENTERS | SWITCHES


def fixed_graph_def(graph_def: Any, plan: Plan, new: int | None) -> Any:
    """Return a copy of a graph with the changes of a plan.

    What is recorded of the shapes of growing nodes is dropped. Functions that change
    are copied under new names: other callers keep the old ones.

    Cost: linear in the nodes, function bodies included, and in the bytes.
    """
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    bodies = {f.signature.name: f for f in graph_def.library.function}
    writer = Writer(result.node, function=False, new=new)
    waiting = _apply(plan, result.node, writer)
    while waiting:
        edit, node = waiting.pop()
        function = result.library.function.add()
        function.CopyFrom(bodies[edit.function])
        function.signature.name = f"{edit.function}_batch_{next(_numbers)}"
        _call(node, edit, function.signature.name)
        waiting += _apply_to_function(function, edit.plan, new)
    return result


def _apply_to_function(
    function: Any, plan: Plan, new: int | None
) -> list[tuple[CallAnew, Any]]:
    args = [arg.name for arg in function.signature.input_arg]
    writer = Writer(function.node_def, function=True, new=new, taken=args)
    for attributes in function.arg_attr.values():
        attributes.attr.pop("_output_shapes", None)
    function.attr.pop("_input_shapes", None)
    for edit in plan.edits:
        if isinstance(edit, Broadcast) and edit.node is None:
            result = function.signature.output_arg[edit.index].name
            source = function.ret[result]
            function.ret[result] = _broadcast(writer, edit, result, source, ())
    return _apply(plan, function.node_def, writer)


def _apply(plan: Plan, nodes: Any, writer: Writer) -> list[tuple[CallAnew, Any]]:
    """Change nodes; return the calls whose functions are to be changed next."""
    by_name = {node.name: node for node in nodes}
    framed = any(node.op in _FRAMES for node in nodes)
    for name in plan.growing:
        by_name[name].attr.pop("_output_shapes", None)
    calls = []
    for edit in plan.edits:
        if edit.node is None:
            continue
        node = by_name[edit.node]
        if isinstance(edit, CallAnew):
            calls.append((edit, node))
        else:
            _change(edit, node, by_name, writer, framed)
    return calls


def _change(
    edit: Edit, node: Any, by_name: dict[str, Any], writer: Writer, framed: bool
) -> None:
    name = f"{node.name}/batch_size"
    if isinstance(edit, SetAttribute):
        node.attr[edit.name].CopyFrom(edit.value)
    elif isinstance(edit, BiasToAdd):
        # As an Identity of the sum it keeps the names of the node and of its output.
        dtype = node.attr["T"].type
        total = writer.add(name, node.input[0], edit.bias, dtype)
        node.op = "Identity"
        node.attr.pop("data_format", None)
        node.input[:] = [total, *(n for n in node.input if n.startswith("^"))]
    elif isinstance(edit, SetConstant):
        after = _controls(by_name.get(node_of(node.input[edit.index])))
        dtype = tf.as_dtype(edit.value.dtype).as_datatype_enum
        node.input[edit.index] = writer.constant(name, edit.value, dtype, after)
    elif isinstance(edit, SetElements):
        pack = by_name[node_of(edit.pack)]
        parts = list(pack.input)
        dtype = pack.attr["T"].type
        for index, value in edit.elements:
            after = _controls(by_name.get(node_of(parts[index])))
            parts[index] = writer.constant(f"{name}/dim_{index}", value, dtype, after)
        node.input[edit.index] = writer.pack(name, parts, dtype)
    elif isinstance(edit, SetDims):
        after = [f"^{node_of(edit.source.tensor)}"] if framed else []
        node.input[edit.index] = writer.dims(
            name, edit.dims, edit.source, edit.dtype, after
        )
    elif isinstance(edit, Broadcast):
        source = node.input[edit.index]
        after = [f"^{node_of(source)}"] if framed else []
        node.input[edit.index] = _broadcast(writer, edit, name, source, after)


def _controls(node: Any) -> list[str]:
    """Return the control inputs of a constant that is replaced."""
    return [] if node is None else [n for n in node.input if n.startswith("^")]


def _broadcast(
    writer: Writer, edit: Broadcast, name: str, tensor: str, after: Iterable[str]
) -> str:
    after = list(after)
    if edit.rows != 1:
        rank = len(edit.dims)
        tensor = writer.first(f"{name}/row", tensor, edit.axis, rank, edit.dtype, after)
    int32 = tf.int32.as_datatype_enum
    shape = writer.dims(f"{name}/shape", edit.dims, edit.source, int32, after)
    return writer.broadcast(name, tensor, shape, edit.dtype)


def _call(node: Any, edit: CallAnew, function: str) -> None:
    if edit.attribute is None:
        node.op = function
        return
    value = node.attr[edit.attribute]
    functions = [value.func] if value.HasField("func") else value.list.func
    functions[edit.position].name = function
