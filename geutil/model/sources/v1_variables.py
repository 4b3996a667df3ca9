"""Reference variables and tables of version 1, as resources outside a graph.

A reference variable (`VariableV2`) hands out the buffer itself. TensorFlow 2 cannot
keep such a variable outside a graph, so its ops are replaced by those of resource
variables: same names, same values read at the same points of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import function_defs, op_types
from geutil.model import programs

_numbers = itertools.count()
_TABLES = frozenset(
    (
        "HashTableV2",
        "MutableHashTableV2",
        "MutableHashTableOfTensorsV2",
        "MutableDenseHashTableV2",
    )
)
_INITIALIZERS = frozenset(
    ("InitializeTableV2", "InitializeTableFromTextFileV2", "LookupTableImportV2")
)


def is_table(node: Any) -> bool:
    """Tell whether a node makes a table."""
    return node.op in _TABLES


def initializer_of(graph_def: Any, table: Any) -> str | None:
    """Return the name of the node that fills a table, None where there is none."""
    for node in graph_def.node:
        if node.op in _INITIALIZERS and programs.node_of(node.input[0]) == table.name:
            return str(node.name)
    return None


def files_of_tables(graph_def: Any) -> dict[str, str]:
    """Return the file that each constant names which a table is filled from."""
    nodes = programs.nodes_by_name(graph_def)
    files = {}
    for node in graph_def.node:
        if node.op == "InitializeTableFromTextFileV2":
            name = nodes[programs.node_of(node.input[1])]
            if name.op == "Const":
                value = tf.make_ndarray(name.attr["value"].tensor).item()
                files[str(name.name)] = value.decode()
    return files


class GraphResource(tf.saved_model.experimental.TrackableResource):
    """A table that a node of a graph makes and another one fills.

    Args:
        graph_def: the graph that both are in.
        table: the node that makes the table.
        initializer: the name of the node that fills it, None when nothing does.
        assets: the file for each constant node that names one.

    Raises:
        tf.errors.OpError: TensorFlow cannot make or fill the table.
    """

    def __init__(
        self,
        graph_def: Any,
        table: Any,
        initializer: str | None,
        assets: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._table = _without_place(table)
        self._name = str(table.name)
        self._initializer = initializer
        self._asset_of: dict[str, tf.saved_model.Asset] = {}
        if initializer is not None:
            nodes = programs.nodes_behind(
                graph_def, [initializer], [self._name, *assets]
            )
            needed = {node.name for node in nodes}
            self._asset_of = {
                name: tf.saved_model.Asset(path)
                for name, path in assets.items()
                if name in needed
            }
            left_out = {self._name, *self._asset_of}
            self._graph_def = programs.subgraph(
                graph_def, [node for node in nodes if node.name not in left_out]
            )
            # The functions of the rest of the graph have no place in it.
            function_defs.with_unique_functions(self._graph_def)
            # Asked for first inside the trace, it would belong to the trace.
            _ = self.resource_handle
            # Called by a concrete function, TensorFlow does not count traces and warn.
            fill = tf.function(self._initialize, autograph=False)
            fill.get_concrete_function()()

    @property
    def assets(self) -> list[tf.saved_model.Asset]:
        """The files that the table is filled from."""
        return list(self._asset_of.values())

    def _create_resource(self) -> Any:
        make = tf.function(lambda: _made_by(self._table), autograph=False)
        return make.get_concrete_function()()

    def _initialize(self) -> None:
        if self._initializer is None:
            return
        input_map = {programs.canonical(self._name): _inside(self.resource_handle)}
        for name, asset in self._asset_of.items():
            input_map[programs.canonical(name)] = _inside(asset.asset_path)
        tf.import_graph_def(self._graph_def, input_map=input_map, name="")


def _made_by(table: Any) -> Any:
    graph_def = tf.compat.v1.GraphDef(node=[table])
    (handle,) = tf.import_graph_def(
        graph_def, return_elements=[programs.canonical(table.name)], name=""
    )
    return handle


def _inside(tensor: Any) -> Any:
    """Return the stand-in for an eager tensor inside the graph that is being traced."""
    return tf.raw_ops.Identity(input=tensor)


def _without_place(table: Any) -> Any:
    """Return the node with a name of its own for the table: models do not share it."""
    node = type(table).FromString(table.SerializeToString())
    name = f"geutil_{node.name}_{next(_numbers)}".encode()
    node.attr["shared_name"].s = name
    node.device = ""
    if "_class" in node.attr:
        del node.attr["_class"]
    del node.input[:]
    return node


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
    variables = {n.name: n for n in graph_def.node if n.op in op_types.REF_VARIABLES}
    if not variables:
        return
    variable_by_node = _variable_behind(graph_def, variables)
    node_names = {node.name for node in graph_def.node}
    added: list[Any] = []
    reads: dict[str, str] = {}
    for node in list(graph_def.node):
        if node.name in variables:
            continue
        kind = node.op
        for index, text in enumerate(node.input):
            variable = variable_by_node.get(programs.node_of(text))
            if variable is None or text.startswith("^"):
                continue
            if kind in _ASSIGNMENTS and index == 0:
                _as_assignment(node, variable, variables[variable])
            elif kind in ("Identity", "RefIdentity"):
                _as_read(node, variable, variables[variable], programs.node_of(text))
            elif kind == "IsVariableInitialized":
                node.op = "VarIsInitializedOp"
                node.attr.pop("dtype", None)
                node.input[index] = variable
            else:
                if text not in reads:
                    reads[text] = programs.fresh_name(
                        node_names, f"{programs.node_of(text)}/geutil_read"
                    )
                    node_names.add(reads[text])
                    read = _new_read(reads[text], variables[variable])
                    _as_read(
                        read, variable, variables[variable], programs.node_of(text)
                    )
                    added.append(read)
                node.input[index] = reads[text]
    for node in variables.values():
        _as_handle(node)
    graph_def.node.extend(added)


def _variable_behind(graph_def: Any, variables: Iterable[str]) -> dict[str, str]:
    """Map each node that hands a reference out to its variable.

    An assignment forwards what it changes. The nodes may come in any order.
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
    before = programs.node_of(node.input[0])
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
