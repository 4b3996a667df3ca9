"""Functions whose arguments are values where they were handles of variables.

A call, loop or conditional that passes a handle on to a function is made to pass the
value, and to call a version of the function that takes it. Versions are named after
what they are made of, so that two of the same name are the same: TensorFlow refuses
functions that share a name and differ, in the whole process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.graph.op_types import LOOPS
from geutil.model.frozen.handle_flow import Value


@dataclass(frozen=True)
class CallKind:
    """A type of op that calls functions.

    Attributes:
        types: the attribute with the types of what it passes.
        offset: how many inputs come before those that it passes.
        functions: the attributes with the functions; all take the same arguments.
    """

    types: str
    offset: int
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
    """A function that is needed with values in place of handles.

    Attributes:
        function: the function that it is made from.
        name: its own name.
        values: (index of the argument, value) for each that was a handle.
        returns: whether it returns each of these at the same index, as the body of a
            loop does; else it returns none.
    """

    function: str
    name: str
    values: tuple[tuple[int, Value], ...]
    returns: bool


class Versions:
    """The versions of functions that are asked for.

    Args:
        library: the functions that there are.
    """

    def __init__(self, library: Any) -> None:
        self.functions = {f.signature.name: f for f in library.function}
        self._digest = b""
        self._made: dict[str, Version] = {}
        self._waiting: list[Version] = []

    def ask(self, function: str, values: Mapping[int, Value], *, returns: bool) -> str:
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


def pass_values(node: Any, values: Mapping[int, Value], versions: Versions) -> None:
    """Make a node of a type in `CALLS` pass values on in place of handles, in place.

    Args:
        node: the node.
        values: the values by the index of the input.
        versions: where versions of the functions are asked for.
    """
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
        kept = [index for index in read_only if index not in values]
        del read_only[:]
        read_only.extend(kept)


def set_types(node: Any, attribute: str, values: Mapping[int, Value]) -> None:
    """Set the types, and the shapes where a node tells them, of values it passes on."""
    types = node.attr[attribute].list.type
    for index, value in values.items():
        types[index] = value.dtype
    if node.op in LOOPS:
        for name in ("output_shapes", "_output_shapes"):
            if name in node.attr:
                set_shapes(node.attr[name], values)
    node.ClearField("experimental_type")


def set_shapes(attr: Any, values: Mapping[int, Value]) -> None:
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


def _one_shape(value: Value) -> Any:
    attr = tf.compat.v1.AttrValue()
    attr.list.shape.add().ParseFromString(value.shape)
    return attr
