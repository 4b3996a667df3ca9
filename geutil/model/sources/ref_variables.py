"""Version 1 reference variables turned into resource variables, on the GraphDef.

A reference variable (`VariableV2`) hands out the buffer itself. TensorFlow 2 cannot
keep such a variable outside a graph, so its ops are replaced by those of resource
variables: same names, same values read at the same points of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geutil.graph.op_types import REF_VARIABLES
from geutil.model.errors import ModelError
from geutil.model.programs.program import fresh_name, node_of

_ASSIGNMENTS = {
    "Assign": "AssignVariableOp",
    "AssignAdd": "AssignAddVariableOp",
    "AssignSub": "AssignSubVariableOp",
}
_MUTATING = ("Scatter", "Apply", "SparseApply", "CountUpTo", "StridedSliceAssign")


def with_resource_variables(graph_def: Any) -> None:
    """Turn the reference variables of a `GraphDef` into resource variables, in place.

    Raises:
        ModelError: an op changes a reference in a way that has no resource twin here.

    Cost: linear in nodes and edges.
    """
    variables = {n.name: n for n in graph_def.node if n.op in REF_VARIABLES}
    if not variables:
        return
    through = _variable_behind(graph_def, variables)
    taken = {node.name for node in graph_def.node}
    added: list[Any] = []
    reads: dict[str, str] = {}
    for node in list(graph_def.node):
        if node.name in variables:
            continue
        kind = node.op
        for index, text in enumerate(node.input):
            variable = through.get(node_of(text))
            if variable is None or text.startswith("^"):
                continue
            if kind in _ASSIGNMENTS and index == 0:
                _as_assignment(node, variable, variables[variable])
            elif kind in ("Identity", "RefIdentity"):
                _as_read(node, variable, variables[variable], node_of(text))
            elif kind == "IsVariableInitialized":
                node.op = "VarIsInitializedOp"
                node.attr.pop("dtype", None)
                node.input[index] = variable
            else:
                if text not in reads:
                    reads[text] = fresh_name(taken, f"{node_of(text)}/geutil_read")
                    taken.add(reads[text])
                    read = _new_read(reads[text], variables[variable])
                    _as_read(read, variable, variables[variable], node_of(text))
                    added.append(read)
                node.input[index] = reads[text]
    for node in variables.values():
        _as_handle(node)
    graph_def.node.extend(added)


def _variable_behind(graph_def: Any, variables: Iterable[str]) -> dict[str, str]:
    """Map each node that hands a reference out to its variable.

    An assignment hands on what it changes. The nodes may come in any order.
    """
    readers: dict[str, list[Any]] = {}
    for node in graph_def.node:
        if node.input:
            readers.setdefault(node.input[0].removesuffix(":0"), []).append(node)
    behind = {name: name for name in variables}
    waiting = list(behind)
    while waiting:
        name = waiting.pop()
        for node in readers.get(name, ()):
            if node.op in _ASSIGNMENTS:
                behind[node.name] = behind[name]
                waiting.append(node.name)
            elif node.op.startswith(_MUTATING):
                raise ModelError(
                    f"'{node.name}' ({node.op}) changes the reference variable "
                    f"'{behind[name]}': only Assign, AssignAdd and AssignSub can be "
                    "turned into ops of resource variables; freeze the graph before "
                    "you open it"
                )
    return behind


def _as_assignment(node: Any, variable: str, definition: Any) -> None:
    dtype = definition.attr["dtype"].type
    before = node_of(node.input[0])
    node.op = _ASSIGNMENTS[node.op]
    node.ClearField("attr")
    node.attr["dtype"].type = dtype
    _read_from(node, variable, before)


def _as_read(node: Any, variable: str, definition: Any, before: str) -> None:
    node.op = "ReadVariableOp"
    node.ClearField("attr")
    node.attr["dtype"].type = definition.attr["dtype"].type
    _read_from(node, variable, before)


def _read_from(node: Any, variable: str, before: str) -> None:
    """Read the handle, after the assignment whose reference was read before."""
    node.input[0] = variable
    if before != variable:
        node.input.append(f"^{before}")


def _new_read(name: str, definition: Any) -> Any:
    node = type(definition)()
    node.name = name
    node.input.append("")
    return node


def _as_handle(node: Any) -> None:
    shape, dtype = node.attr["shape"].shape, node.attr["dtype"].type
    name = node.attr["shared_name"].s or node.name.encode()
    replacement = type(node)(name=node.name, op="VarHandleOp", device=node.device)
    replacement.attr["dtype"].type = dtype
    replacement.attr["shape"].shape.CopyFrom(shape)
    replacement.attr["shared_name"].s = name
    replacement.input.extend(node.input)
    node.CopyFrom(replacement)
