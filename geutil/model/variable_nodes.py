"""Nodes of variables: read by value in place of handles, or turned into resources.

A handle passes through some ops as it is. References are as nodes write them without a
`:0` at the end: `node` and `node:1` in a graph, `argument`, `node:output` and
`node:output:1` in a function.

Nodes are changed in place: readers of a handle read the value that replaces it.
References to a node stay as they are, except in functions, which name the outputs of
ops: see `OUTPUT_NAMES`.

A call, loop or conditional that passes a handle on to a function is made to pass the
value, and to call a version of the function that takes it. Versions are named after
their sources, so that two of the same name are equal: TensorFlow refuses functions that
share a name and differ, in the whole process.

A reference variable of version 1 (`VariableV2`) hands out the buffer itself. TensorFlow
2 cannot keep such a variable outside a graph, so its ops are replaced by those of
resource variables: same names, same values read at the same points of a run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import function_calls, op_types
from geutil.graph.protos import op_def_of
from geutil.graph.walks import (
    closure,
    node_name,
    short_name,
    tensor_name,
)
from geutil.model import programs

SINGLE_PASSES = frozenset(("Identity", "Enter", "Exit", "NextIteration", "Merge"))
LIST_PASSES = frozenset(("IdentityN",)) | op_types.LOOPS


@dataclass(frozen=True)
class HandleValue:
    """The replacement of a handle."""

    variable: str  # The name of the variable, for messages.
    dtype: int  # The number of its `tf.DType`.
    shape: bytes


@dataclass
class Carrier:
    """A node that reads handles."""

    node: Any
    # The value for each input, by index, that is a handle.
    values: dict[int, HandleValue] = field(default_factory=dict)


def handle_flow(
    nodes: Iterable[Any], seeds: Mapping[str, HandleValue], *, in_function: bool
) -> tuple[dict[str, HandleValue], list[Carrier]]:
    """Return the values by all references that are handles, and their readers."""
    # `seeds` are the references that are handles to begin with.
    listed = list(nodes)
    readers = _readers(listed)
    values = dict(seeds)
    carriers: dict[int, Carrier] = {}

    def passed_on(reference: str) -> Iterator[str]:
        for place, index in readers.get(reference, ()):
            carrier = carriers.setdefault(place, Carrier(listed[place]))
            carrier.values[index] = values[reference]
            for passed in _passed_on(listed[place], index, in_function):
                values.setdefault(passed, values[reference])
                yield passed

    closure(seeds, passed_on)
    return values, [carriers[place] for place in sorted(carriers)]


def _readers(nodes: Iterable[Any]) -> dict[str, list[tuple[int, int]]]:
    """Return the readers of each tensor: the place of a node, and of its input."""
    readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, node in enumerate(nodes):
        for index, text in enumerate(node.input):
            readers[short_name(text)].append((place, index))
    return readers


def passes(node: Any, index: int) -> bool:
    """Return whether a node passes a handle on as it is."""
    if node.op in SINGLE_PASSES or node.op in LIST_PASSES:
        return True
    return (node.op, index) == ("Switch", 0)


def _passed_on(node: Any, index: int, in_function: bool) -> Iterator[str]:
    """Yield the references to the outputs that are the handle at input `index`."""
    if node.op in SINGLE_PASSES:
        outputs = [("output", 0, 0)]
    elif node.op in LIST_PASSES:
        outputs = [("output", index, index)]
    elif (node.op, index) == ("Switch", 0):
        outputs = [("output_false", 0, 0), ("output_true", 0, 1)]
    else:
        outputs = []
    for argument, within, position in outputs:
        if in_function:
            yield short_name(f"{node.name}:{argument}:{within}")
        else:
            yield short_name(f"{node.name}:{position}")


@dataclass(frozen=True)
class CallKind:
    """A type of op that calls functions."""

    types: str  # The attribute with the types of its arguments.
    offset: int  # How many inputs come before those that it passes.
    # The attributes with the functions; all take the same arguments.
    functions: tuple[str, ...]


_CALL = CallKind("Tin", 0, ("f",))
_LOOP = CallKind("T", 0, ("cond", "body"))
_BRANCHES = CallKind("Tin", 1, ("then_branch", "else_branch"))
_CASE = CallKind("Tin", 1, ("branches",))
CALLS = {
    "PartitionedCall": _CALL,
    "StatefulPartitionedCall": _CALL,
    "While": _LOOP,
    "StatelessWhile": _LOOP,
    "If": _BRANCHES,
    "StatelessIf": _BRANCHES,
    "Case": _CASE,
    "StatelessCase": _CASE,
}


@dataclass(frozen=True)
class Version:
    """A function that is needed with values in place of handles."""

    function: str  # The function that it is made from.
    name: str
    # (index of the argument, value) for each that was a handle.
    values: tuple[tuple[int, HandleValue], ...]
    # True if it returns each of these at the same index, as the body of a loop does;
    # else it returns none.
    returns: bool


class Versions:
    """The versions of functions that are asked for."""

    def __init__(self, library: Any, changes: list[str] | None = None) -> None:
        self.changes = changes
        self.functions = {f.signature.name: f for f in library.function}
        self._digest = b""
        self._made: dict[str, Version] = {}
        self._waiting: list[Version] = []

    def ask(
        self, function: str, values: Mapping[int, HandleValue], *, returns: bool
    ) -> str:
        """Return the name of a version of a function."""
        ordered = tuple(sorted(values.items()))
        described = [(i, v.dtype, v.shape) for i, v in ordered]
        key = repr((function, described, returns)).encode()
        digest = hashlib.sha256(self._library_digest() + key).hexdigest()[:16]
        name = f"{function}_frozen_{digest}"
        if name not in self._made:
            self._made[name] = Version(function, name, ordered, returns)
            self._waiting.append(self._made[name])
        return name

    def waiting(self) -> Iterator[Version]:
        """Yield each version once, those too that are asked for on the way."""
        while self._waiting:
            yield self._waiting.pop()

    def _library_digest(self) -> bytes:
        if not self._digest:
            digest = hashlib.sha256()
            for _, function in sorted(self.functions.items()):
                digest.update(function.SerializeToString(deterministic=True))
            self._digest = digest.digest()
        return self._digest


def pass_values(
    node: Any, values: Mapping[int, HandleValue], versions: Versions
) -> None:
    """Make a node of a type in `CALLS` pass values on in place of handles, in place."""
    kind = CALLS[node.op]
    passed = {index - kind.offset: value for index, value in values.items()}
    set_types(node, kind.types, passed)
    for attribute in kind.functions:
        attr = node.attr[attribute]
        called = [attr.func] if attr.HasField("func") else attr.list.func
        for function in called:
            returns = node.op in op_types.LOOPS and attribute == "body"
            function.name = versions.ask(function.name, passed, returns=returns)
    # A gradient that is registered for the op takes the handles.
    node.attr.pop("_gradient_op_type", None)
    if "_read_only_resource_inputs" in node.attr:
        read_only = node.attr["_read_only_resource_inputs"].list.i
        remaining_indices = [index for index in read_only if index not in values]
        read_only[:] = remaining_indices


def set_types(node: Any, attribute: str, values: Mapping[int, HandleValue]) -> None:
    """Set the types, and the shapes where a node tells them, of values it passes on."""
    types = node.attr[attribute].list.type
    for index, value in values.items():
        types[index] = value.dtype
    if node.op in op_types.LOOPS:
        for name in ("output_shapes", "_output_shapes"):
            if name in node.attr:
                set_shapes(node.attr[name], values)
    node.ClearField("experimental_type")


def set_shapes(attr: Any, values: Mapping[int, HandleValue]) -> None:
    """Set the shapes of values in a list of shapes."""
    shapes = attr.list.shape
    for index, value in values.items():
        if index < len(shapes):
            shapes[index].ParseFromString(value.shape)


def take_values(function: Any, version: Version) -> None:
    """Make the arguments of a function values in place of handles, in place."""
    function.signature.name = version.name
    for index, value in version.values:
        argument = function.signature.input_arg[index]
        argument.type = value.dtype
        argument.ClearField("handle_data")
        argument.ClearField("experimental_full_type")
        attributes = function.arg_attr[index].attr
        for name in ("_handle_dtypes", "_handle_shapes"):
            attributes.pop(name, None)
        attributes["_output_shapes"].CopyFrom(_one_shape(value))
        function.resource_arg_unique_id.pop(index, None)
    if "_input_shapes" in function.attr:
        set_shapes(function.attr["_input_shapes"], dict(version.values))
    # These name other functions that replace this one, and take handles.
    for name in (
        "api_implements",
        "forward_function_name",
        "backward_function_name",
    ):
        function.attr.pop(name, None)


def _one_shape(value: HandleValue) -> Any:
    attr = tf.compat.v1.AttrValue()
    attr.list.shape.add().ParseFromString(value.shape)
    return attr


OUTPUT_NAMES = {"ReadVariableOp": "value", "VarIsInitializedOp": "is_initialized"}
"""Names of outputs of ops that are called `output` in their replacements."""


def set_op_type(node: Any, op: str, **types: int) -> None:
    """Change the type of a node; attributes that start with `_` stay."""
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.op = op
    node.ClearField("experimental_type")
    for name, dtype in types.items():
        node.attr[name].type = dtype


def _read(node: Any, value: HandleValue) -> None:
    set_op_type(node, "Identity", T=value.dtype)


def _gather(node: Any, value: HandleValue) -> None:
    indices = node.attr["Tindices"].type
    batch_dims = node.attr["batch_dims"].i
    axis = tf.int32.as_datatype_enum
    set_op_type(node, "GatherV2", Tparams=value.dtype, Tindices=indices, Taxis=axis)
    node.attr["batch_dims"].i = batch_dims


def _gather_nd(node: Any, value: HandleValue) -> None:
    indices = node.attr["Tindices"].type
    set_op_type(node, "GatherNd", Tparams=value.dtype, Tindices=indices)


def _shape(node: Any, value: HandleValue) -> None:
    out_type = node.attr["out_type"].type or tf.int32.as_datatype_enum
    set_op_type(node, "Shape", T=value.dtype, out_type=out_type)


def _is_initialized(node: Any, _: HandleValue) -> None:
    set_op_type(node, "Const")
    node.attr["dtype"].type = tf.bool.as_datatype_enum
    true = programs.const_node("", tf.constant(True))
    node.attr["value"].CopyFrom(true.attr["value"])


READS: dict[str, Callable[[Any, HandleValue], None]] = {
    "ReadVariableOp": _read,
    "ResourceGather": _gather,
    "ResourceGatherNd": _gather_nd,
    "VariableShape": _shape,
    "VarIsInitializedOp": _is_initialized,
}
"""By type of op: the function that turns a node that reads a handle into one that reads
a value.
"""


def turn_into_value_read(
    node: Any,
    value: HandleValue,
    fresh: Callable[[str], str],
    *,
    waits: Iterable[str] = (),
    in_function: bool,
) -> list[Any]:
    """Turn a node of a type in `READS` into one that reads a value."""
    # In a loop of version 1 a constant has to wait for something that is in the loop
    # too: `waits`.
    kind = node.op
    axis = node.attr["batch_dims"].i if kind == "ResourceGather" else 0
    READS[kind](node, value)
    if kind == "VarIsInitializedOp":
        del node.input[0]
        node.input.extend(wait for wait in waits if wait not in node.input)
    if kind != "ResourceGather":
        return []
    added = programs.const_node(fresh(f"{node.name}/axis"), tf.constant(np.int32(axis)))
    added.device = node.device
    added.input.extend(waits)
    controls = node.input[2:]
    del node.input[2:]
    node.input.append(f"{added.name}:output:0" if in_function else added.name)
    node.input.extend(controls)
    return [added]


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
    """Return whether a node makes a table."""
    return node.op in _TABLES


def initializer_of(graph_def: Any, table: Any) -> str | None:
    """Return the name of the node that fills a table, None where there is none."""
    for node in graph_def.node:
        if node.op in _INITIALIZERS and node_name(node.input[0]) == table.name:
            return str(node.name)
    return None


def files_of_tables(graph_def: Any) -> dict[str, str]:
    """Return the file that each constant names which a table is filled from."""
    nodes = programs.nodes_by_name(graph_def)
    files = {}
    for node in graph_def.node:
        if node.op == "InitializeTableFromTextFileV2":
            name = nodes[node_name(node.input[1])]
            if name.op == "Const":
                value = tf.make_ndarray(name.attr["value"].tensor).item()
                files[str(name.name)] = value.decode()
    return files


class GraphResource(tf.saved_model.experimental.TrackableResource):
    """A table that a node of a graph makes and another one fills."""

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
            function_calls.with_unique_functions(self._graph_def)
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
        input_map = {tensor_name(self._name): _inside(self.resource_handle)}
        for name, asset in self._asset_of.items():
            input_map[tensor_name(name)] = _inside(asset.asset_path)
        tf.import_graph_def(self._graph_def, input_map=input_map, name="")


def _made_by(table: Any) -> Any:
    graph_def = tf.compat.v1.GraphDef(node=[table])
    (handle,) = tf.import_graph_def(
        graph_def, return_elements=[tensor_name(table.name)], name=""
    )
    return handle


def _inside(tensor: Any) -> Any:
    """Return an eager tensor as one of the graph that is being traced."""
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


_TWINS = {
    "Assign": "AssignVariableOp",
    "AssignAdd": "AssignAddVariableOp",
    "AssignSub": "AssignSubVariableOp",
    "IsVariableInitialized": "VarIsInitializedOp",
    **{
        f"Ref{kind}": kind
        for kind in ("Enter", "Exit", "Identity", "Merge", "NextIteration", "Switch")
    },
}
"""By type of an op that takes references: the one that takes handles.

That of all others has the same name behind `Resource`, such as `ResourceApplyAdam`.
"""
_RESOURCE = tf.resource.as_datatype_enum


@dataclass(frozen=True)
class _Reference:
    """A tensor that is a reference."""

    variable: str  # The name of its variable; of one of them, where several ways meet.
    handle: str  # The tensor that is the variable's handle there.
    # The op that hands it out once it has changed the variable; "" for none.
    change: str = ""


def with_resource_variables(graph_def: Any, ends: Iterable[str]) -> dict[str, str]:
    """Turn reference variables into resource variables; return the values of `ends`."""
    # References go through branches and loops of version 1, as handles do.
    variables = {n.name: n for n in graph_def.node if n.op in op_types.REF_VARIABLES}
    if not variables:
        return {}
    turned = _Turned(graph_def, _references(graph_def, variables))
    for node in list(graph_def.node):
        if node.name not in variables:
            turned.turn(node)
    values = {t: turned.value(short_name(t)) for t in ends if turned.is_one(t)}
    for node in variables.values():
        _as_handle(node)
    graph_def.node.extend(turned.added.values())
    _Buffers(graph_def, turned.read_from, turned.changing).read_anew()
    return values


def _references(graph_def: Any, variables: Mapping[str, Any]) -> dict[str, _Reference]:
    """Return the tensors that are references. The nodes may come in any order."""
    listed = list(graph_def.node)
    readers = _readers(listed)
    found = {name: _Reference(name, name) for name in variables}

    def handed_on(name: str) -> Iterator[str]:
        reference = found[name]
        for place, index in readers.get(name, ()):
            node = listed[place]
            if not takes_reference(node, index):
                continue
            if op_def_of(_twin(node)) is None:
                raise ModelError(
                    f"'{node.name}' ({node.op}) takes the reference variable "
                    f"'{reference.variable}': TensorFlow has no such op for resource "
                    "variables; freeze the graph before you open it"
                )
            for text, other in _handed_on(node, index, reference):
                found.setdefault(text, other)
                yield text

    closure(variables, handed_on)
    return found


def _twin(node: Any) -> str:
    return _TWINS.get(node.op, f"Resource{node.op}")


def takes_reference(node: Any, index: int) -> bool:
    """Return whether an input of a node has to be a reference."""
    definition = op_def_of(node.op)
    if definition is None:
        return False
    # A list comes last.
    arguments = definition.input_arg
    return bool(arguments) and bool(arguments[min(index, len(arguments) - 1)].is_ref)


def _handed_on(
    node: Any, index: int, reference: _Reference
) -> Iterator[tuple[str, _Reference]]:
    """Yield the references that an op makes of one, by name."""
    if _twin(node) == node.op.removeprefix("Ref"):
        texts = [node.name, f"{node.name}:1"][: 1 + (node.op == "RefSwitch")]
        yield from ((text, _Reference(reference.variable, text)) for text in texts)
        return
    definition: Any = op_def_of(node.op)
    if index == 0 and any(arg.is_ref for arg in definition.output_arg):
        yield node.name, replace(reference, change=node.name)


class _Turned:
    """A graph whose reference variables are being turned into resource variables."""

    def __init__(self, graph_def: Any, references: Mapping[str, _Reference]) -> None:
        nodes = programs.nodes_by_name(graph_def)
        self._references = references
        self._dtypes = {
            text: nodes[reference.variable].attr["dtype"].type
            for text, reference in references.items()
        }
        self._node_names = set(nodes)
        self._names: dict[tuple[str, str], str] = {}
        self.added: dict[str, Any] = {}
        # By the names of nodes that read a variable its handle.
        self.read_from: dict[str, str] = {}
        self.changing: set[str] = set()  # The names of nodes that change a variable.

    def is_one(self, tensor_name: str) -> bool:
        """Return whether a tensor is a reference."""
        return short_name(tensor_name) in self._references

    def turn(self, node: Any) -> None:
        """Let a node read handles, or values, in the place of references."""
        taken = [(i, text) for i, text in enumerate(node.input) if self.is_one(text)]
        references = [i for i, _ in taken if takes_reference(node, i)]
        if references:
            dtype = self._dtypes[short_name(node.input[references[0]])]
            self._take_handles(node, dtype, references)
        for index, text in taken:
            if index in references:
                continue
            if node.op == "Identity":
                self._read(node, short_name(text))
            else:
                node.input[index] = self.value(short_name(text))

    def _take_handles(self, node: Any, dtype: int, indices: Iterable[int]) -> None:
        twin = _twin(node)
        definition: Any = op_def_of(twin)
        declared = {attr.name for attr in definition.attr}
        stay = (n for n in node.attr if n in declared or n.startswith("_"))
        for name in set(node.attr).difference(stay) | {"_output_shapes"}:
            node.attr.pop(name, None)
        passes_on = twin == node.op.removeprefix("Ref")
        if not passes_on and node.op != "IsVariableInitialized":
            self.changing.add(node.name)
        for name in declared & {"T", "dtype"}:
            node.attr[name].type = _RESOURCE if passes_on else dtype
        for index in indices:
            reference = self._references[short_name(node.input[index])]
            if node.op == "RefMerge" and reference.change:
                # It may come from a branch that is not taken: nothing waits for that.
                node.input[index] = self._handle(short_name(node.input[index]))
            else:
                _read_from(node, index, reference)
        node.op = twin

    def value(self, text: str) -> str:
        """Return the tensor that is the value of a reference."""
        name, is_new = self._name(text, "geutil_read")
        if is_new:
            self._read(self._new(name), text)
        return name

    def _handle(self, text: str) -> str:
        """Return the handle behind a reference, after the change that it marks."""
        name, is_new = self._name(text, "geutil_handle")
        if is_new:
            node = self._new(name)
            node.op = "Identity"
            node.attr["T"].type = _RESOURCE
            _read_from(node, 0, self._references[text])
        return name

    def _name(self, text: str, what: str) -> tuple[str, bool]:
        if (text, what) in self._names:
            return self._names[text, what], False
        name = programs.take_name(self._node_names, f"{node_name(text)}/{what}")
        self._names[text, what] = name
        return name, True

    def _new(self, name: str) -> Any:
        node = tf.compat.v1.NodeDef(name=name, input=[""])
        self.added[name] = node
        return node

    def _read(self, node: Any, text: str) -> None:
        """Turn a node into one that reads the variable behind a reference."""
        node.op = "ReadVariableOp"
        node.ClearField("attr")
        node.attr["dtype"].type = self._dtypes[text]
        _read_from(node, 0, self._references[text])
        self.read_from[node.name] = self._references[text].handle


class _Buffers:
    """The values of variables that are their buffers, and change with them."""

    # An `Identity`, `Switch` or `Enter` of a reference shares its buffer: a read after
    # a change sees the new value. A resource variable is read once, so ops that come
    # after a change, by any way, get a read of their own.

    def __init__(
        self, graph_def: Any, read_from: Mapping[str, str], changing: Iterable[str]
    ) -> None:
        self._graph_def = graph_def
        self._nodes = programs.nodes_by_name(graph_def)
        self._handles = dict(read_from)
        self._dtypes = {
            name: self._nodes[name].attr["dtype"].type for name in read_from
        }
        self._readers: dict[str, list[Any]] = {}
        for node in graph_def.node:
            for name in dict.fromkeys(map(node_name, node.input)):
                self._readers.setdefault(name, []).append(node)
        self._after = self._behind(changing)
        self._names = set(self._nodes)

    def read_anew(self) -> None:
        """Give ops that come after a change reads of their own, in place."""
        if not self._after:
            return
        added: list[Any] = []
        waiting = list(self._handles)
        for text in waiting:
            for node in self._readers.get(node_name(text), ()):
                indices = [i for i, t in enumerate(node.input) if short_name(t) == text]
                if not indices:
                    continue
                if node.op in ("Identity", "Switch", "Enter") and indices[0] == 0:
                    waiting += self._share(node, text, added)
                # The input of a Merge from another branch may never come.
                if node.name in self._after and node.op != "Merge":
                    self._read(node, indices, text, added)
        self._graph_def.node.extend(added)

    def _share(self, node: Any, text: str, added: list[Any]) -> list[str]:
        """Note that a node hands a buffer on, and return the tensors that it makes."""
        handle = self._handles[text]
        if node.op != "Identity":
            twin = type(node).FromString(node.SerializeToString())
            twin.name = programs.take_name(self._names, f"{node.name}/geutil_handle")
            twin.input[0] = handle
            twin.attr["T"].type = _RESOURCE
            twin.attr.pop("_output_shapes", None)
            twin.attr.pop("_class", None)
            added.append(twin)
            handle = twin.name
        # A Switch has two results.
        made = [node.name, f"{node.name}:1"][: 1 + (node.op == "Switch")]
        new = [name for name in made if name not in self._handles]
        for name in new:
            self._handles[name] = handle + name.removeprefix(node.name)
            self._dtypes[name] = self._dtypes[text]
        return new

    def _read(
        self, node: Any, indices: Sequence[int], text: str, added: list[Any]
    ) -> None:
        """Let a node read a variable when all else that it waits for is there."""
        # Earlier reads may have waited for a change themselves.
        waited = map(node_name, node.input)
        name = programs.take_name(self._names, f"{node.name}/geutil_read")
        read = type(node)(name=name, op="ReadVariableOp")
        read.device = self._nodes[node_name(text)].device
        read.attr["dtype"].type = self._dtypes[text]
        read.input.append(self._handles[text])
        read.input.extend(
            f"^{name}" for name in dict.fromkeys(waited) if name in self._after
        )
        for index in indices:
            node.input[index] = read.name
        added.append(read)

    def _behind(self, changing: Iterable[str]) -> set[str]:
        """Return the nodes that wait for a change, and those that make one."""
        return set(
            closure(changing, lambda n: (r.name for r in self._readers.get(n, ())))
        )


def _read_from(node: Any, index: int, reference: _Reference) -> None:
    """Read the handle, after the change that the reference marks."""
    node.input[index] = reference.handle
    wait = f"^{reference.change}"
    if reference.change and wait not in node.input:
        node.input.append(wait)


def _as_handle(node: Any) -> None:
    shape, dtype = node.attr["shape"].shape, node.attr["dtype"].type
    name = node.attr["shared_name"].s or node.name.encode()
    replacement = type(node)(name=node.name, op="VarHandleOp", device=node.device)
    replacement.attr["dtype"].type = dtype
    replacement.attr["shape"].shape.CopyFrom(shape)
    replacement.attr["shared_name"].s = name
    replacement.input.extend(node.input)
    node.CopyFrom(replacement)
