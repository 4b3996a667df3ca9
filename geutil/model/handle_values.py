"""Nodes and functions that read variables, given values in place of handles.

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
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.op_types import LOOPS
from geutil.graph.walks import closure, control_references, data_inputs, short_name
from geutil.model.programs import const_node

SINGLE_PASSES = frozenset(("Identity", "Enter", "Exit", "NextIteration", "Merge"))
LIST_PASSES = frozenset(("IdentityN",)) | LOOPS
_SWITCH = "Switch"


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
    readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    listed = list(nodes)
    for place, node in enumerate(listed):
        for index, text in enumerate(node.input):
            readers[short_name(text)].append((place, index))
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


def passes(node: Any, index: int) -> bool:
    """Tell whether a node passes a handle on as it is."""
    if node.op in SINGLE_PASSES or node.op in LIST_PASSES:
        return True
    return (node.op, index) == (_SWITCH, 0)


def _passed_on(node: Any, index: int, in_function: bool) -> Iterator[str]:
    """Yield the references to the outputs that are the handle at input `index`."""
    if node.op in SINGLE_PASSES:
        outputs = [("output", 0, 0)]
    elif node.op in LIST_PASSES:
        outputs = [("output", index, index)]
    elif (node.op, index) == (_SWITCH, 0):
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
            returns = node.op in LOOPS and attribute == "body"
            function.name = versions.ask(function.name, passed, returns=returns)
    # A gradient that is registered for the op takes the handles.
    node.attr.pop("_gradient_op_type", None)
    if "_read_only_resource_inputs" in node.attr:
        read_only = node.attr["_read_only_resource_inputs"].list.i
        remaining_indices = [index for index in read_only if index not in values]
        del read_only[:]
        read_only.extend(remaining_indices)


def set_types(node: Any, attribute: str, values: Mapping[int, HandleValue]) -> None:
    """Set the types, and the shapes where a node tells them, of values it passes on."""
    types = node.attr[attribute].list.type
    for index, value in values.items():
        types[index] = value.dtype
    if node.op in LOOPS:
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
    # These name other functions that stand in for this one, and take handles.
    for name in _STAND_INS:
        function.attr.pop(name, None)


_STAND_INS = ("api_implements", "forward_function_name", "backward_function_name")


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
    true = const_node("", tf.constant(True))
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
    added = const_node(fresh(f"{node.name}/axis"), tf.constant(np.int32(axis)))
    added.device = node.device
    added.input.extend(waits)
    controls = node.input[2:]
    del node.input[2:]
    node.input.append(f"{added.name}:output:0" if in_function else added.name)
    node.input.extend(controls)
    return [added]


_SUMS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


_UPDATES = (
    "Assign",
    "ResourceApply",
    "ResourceCountUpTo",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)


def only_changes(node: Any) -> bool:
    """Tell whether a node changes variables, and yields none but the old value."""
    return node.op.startswith(_UPDATES)


def turn_into_new_value(node: Any, value: HandleValue, waits: Iterable[str]) -> str:
    """Turn a node that changes a variable into one that computes the new value."""
    # An update that is no assignment, sum or difference is left out: the old value
    # stays.
    if node.op in _SUMS:
        set_op_type(node, _SUMS[node.op], T=value.dtype)
        return "z"
    data = data_inputs(node.input)
    controls = control_references(node.input)
    if node.op == "AssignVariableOp":
        data = data[1:]
        controls += [wait for wait in waits if wait not in controls]
    set_op_type(node, "Identity", T=value.dtype)
    del node.input[:]
    node.input.extend([data[0], *controls])
    return "output"
