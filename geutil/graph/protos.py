"""Protos of TensorFlow: op definitions, assets, owners, the functions of a `GraphDef`.

Functions stay protobufs: no graph is made and nothing is run.

Inside a `FunctionDef` a node reads `node:output:index`, an argument by its name, and
results are a map. Here a body reads as a `GraphDef` does: `node`, `node:k`, `^node`.
Outputs of several tensors are counted through, which takes the signature of the op.

A call runs every stateful op of its body, whichever of its outputs is asked for, after
all that it reads and before all that reads it. Once the body stands in the caller's
place, only data and control edges order it, and only ancestors of an output run.
"""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from google.protobuf import (  # type: ignore[import-untyped]
    text_encoding,
    text_format,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from geutil.errors import TransformError
from geutil.graph import _tf, op_types
from geutil.graph._tf import AssetFileDef, DataType, get_op_def
from geutil.graph.types import Operation, is_reference
from geutil.graph.walks import closure, node_name, topological_order


def all_nodes(graph_def: Any) -> Iterator[Any]:
    """Yield the nodes of a `GraphDef`, then those of its functions."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def new_trackable() -> Any:
    """Return an object whose attributes are saved in a SavedModel."""
    return tf.__internal__.tracking.AutoTrackable()


def owner_of(handle: Any) -> Any:
    """Return the object that holds a resource handle as its `resource_handle`."""
    # A function captures the handle of a table and not the table; TensorFlow can save
    # the table only. None if no such object is alive.
    for referrer in gc.get_referrers(handle):
        holders = [referrer]
        if isinstance(referrer, dict):
            # Before Python 3.11, and for some objects after it, attributes are held by
            # a dictionary.
            holders = gc.get_referrers(referrer)
        for holder in holders:
            if _is_owner(holder, handle):
                return holder
    return None


def _is_owner(obj: Any, handle: Any) -> bool:
    kind = type(obj)
    if not hasattr(kind, "resource_handle") or not hasattr(kind, "_create_resource"):
        return False
    return obj.resource_handle is handle


_COLLECTION = "saved_model_assets"


def asset_files(meta_graph: Any) -> dict[str, str]:
    """Return the file in `assets/` for each constant node that names one."""
    # Version 1 keeps the definitions in a collection.
    definitions = list(meta_graph.asset_file_def)
    if _COLLECTION in meta_graph.collection_def:
        for packed in meta_graph.collection_def[_COLLECTION].any_list.value:
            definition = AssetFileDef()
            if packed.Unpack(definition):
                definitions.append(definition)
    return {node_name(d.tensor_info.name): d.filename for d in definitions}


AttrValue: TypeAlias = tf.compat.v1.AttrValue
FunctionDef: TypeAlias = _tf.FunctionDef
FunctionDefLibrary: TypeAlias = _tf.FunctionDefLibrary
GraphDef: TypeAlias = tf.compat.v1.GraphDef
MetaGraphDef: TypeAlias = tf.compat.v1.MetaGraphDef
NodeDef: TypeAlias = tf.compat.v1.NodeDef
OpDef: TypeAlias = _tf.OpDef
SavedModel: TypeAlias = _tf.SavedModel
SavedObjectGraph: TypeAlias = _tf.SavedObjectGraph
TensorProto: TypeAlias = _tf.TensorProto
TensorShapeProto: TypeAlias = _tf.TensorShapeProto

PARSE_ERRORS: tuple[type[Exception], ...] = (
    DecodeError,
    RecursionError,
    text_format.ParseError,
)
"""Errors that parsing a damaged proto raises, binary or text."""

DATA_TYPES: frozenset[int] = frozenset(DataType.values())
"""The numbers of the data types that this TensorFlow knows."""


def op_def_of(op_type: str) -> Any | None:
    """Return the `OpDef` of an op type, those of loaded libraries too, or None."""
    return _tf.get_op_def(op_type)


_LONG = 1 << 14
"""Characters of a string beyond which protobuf's parser does not get to see it."""
_OPENING = re.compile(r"[\"'#]")
_PIECE = re.compile(
    r"(?:[^\\]|\\[0-7]{1,3}|\\[xX][0-9a-fA-F]{1,2}|\\u.{4}|\\U.{8}|\\.){1,4096}"
)
_MARK = "\x01long string %d\x01"
_MARKS = re.compile(rb"\x01long string (\d+)\x01")


def parse_text(text: str, message: Any) -> Any:
    """Parse the text form of a proto into `message`, and return it."""
    # Protobuf's own parser takes 120 times the memory of a long string, such as the
    # values of a constant. They are cut out before, and put in behind it.
    long_strings: list[tuple[int, int]] = []
    parts: list[str] = []
    end = 0
    for start, stop in _strings(text):
        # Strings over several lines are refused, by the parser.
        is_line = text.find("\n", start, stop) < 0
        if stop - start > _LONG and is_line and text.isascii():
            parts += (text[end:start], _MARK % len(long_strings))
            long_strings.append((start, stop))
            end = stop
    if long_strings:
        short = io.StringIO("".join((*parts, text[end:])))
        text_format.ParseLines(short, message)
        if _put_in(message, text, long_strings):
            return message
        message.Clear()
    return text_format.ParseLines(io.StringIO(text), message)


def _strings(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the strings of a text begin and end, without their quotes."""
    at = 0
    while found := _OPENING.search(text, at):
        start = found.end()
        if found[0] == "#":
            at = text.find("\n", start) + 1 or len(text)
            continue
        stop = text.find(found[0], start)
        # A quote behind an odd number of backslashes is a part of the string.
        while stop >= 0 and _backslashes(text, start, stop) % 2:
            stop = text.find(found[0], stop + 1)
        if stop < 0:
            return
        yield start, stop
        at = stop + 1


def _backslashes(text: str, start: int, stop: int) -> int:
    """Return how many backslashes stand before a place."""
    at = stop
    while at > start and text[at - 1] == "\\":
        at -= 1
    return stop - at


def _put_in(message: Any, text: str, long_strings: list[tuple[int, int]]) -> bool:
    """Replace marks in a proto by their strings; tell whether all were found."""
    # A key of a map, for one, cannot be replaced.
    left = set(range(len(long_strings)))

    def value(found: re.Match[bytes]) -> bytes:
        place = int(found[1])
        if place >= len(long_strings):
            return found[0]
        left.discard(place)
        # Piece by piece, since what replaces escapes takes much memory, too.
        whole = bytearray()
        for piece in _PIECE.finditer(text, *long_strings[place]):
            try:
                whole += text_encoding.CUnescape(piece[0])
            except ValueError as error:
                raise text_format.ParseError(str(error)) from error
        return bytes(whole)

    def replaced(field: Any, mark: Any) -> Any:
        if isinstance(mark, bytes):
            return _MARKS.sub(value, mark)
        try:
            return _MARKS.sub(value, mark.encode()).decode()
        except UnicodeDecodeError as error:
            raise text_format.ParseError(f"{field.name}: no UTF-8: {error}") from error

    waiting = [message]
    for owner in waiting:
        for entry, content in owner.ListFields():
            if entry.message_type is not None:
                values = [content] if hasattr(content, "ListFields") else content
                if entry.message_type.GetOptions().map_entry:
                    values = content.values()
                waiting += [v for v in values if hasattr(v, "ListFields")]
            elif isinstance(content, str | bytes):
                setattr(owner, entry.name, replaced(entry, content))
            elif entry.cpp_type == entry.CPPTYPE_STRING:
                content[:] = [replaced(entry, one) for one in content]
    return not left


def signature_of(op: str, library: Mapping[str, Any]) -> Any | None:
    """Return the `OpDef` of an op or a function of `library`, or None."""
    function = library.get(op)
    return get_op_def(op) if function is None else function.signature


def output_name(node: str, index: int) -> str:
    """Return how a `GraphDef` names output `index` of `node`."""
    return f"{node}:{index}" if index else node


def default_of(attribute: Any) -> Any | None:
    """Return the default of an attribute of a signature, or None."""
    return attribute.default_value if attribute.HasField("default_value") else None


class FlatNames:
    """Turns the names of one function's tensors into those of a `GraphDef`."""

    def __init__(
        self,
        function: str,
        args: list[str],
        definitions: list[Any],
        library: Mapping[str, Any],
    ) -> None:
        self._function = function
        self._args = frozenset(args)
        self._library = library
        self._nodes = {d.name: d for d in definitions}
        # Names are all that edges refer to: a second one would hide the first.
        if len(self._nodes.keys() | self._args) < len(definitions) + len(args):
            raise TransformError(
                f"two nodes or arguments of function '{function}' have the same name"
            )
        self._outputs: dict[str, dict[str, tuple[int, int]]] = {}

    def of(self, name: str, reader: str) -> str:
        """Return the `GraphDef` name of the tensor that `reader` calls `name`."""
        if name.startswith("^"):
            self._check(name[1:] in self._nodes or name[1:] in self._args, name, reader)
            return name
        node, *output = name.split(":")
        if node in self._args:
            # An argument is one tensor, so it has no output but the first.
            self._check(output in ([], ["0"]), name, reader)
            return node
        self._check(node in self._nodes and len(output) <= 2, name, reader)
        if not output:
            return node
        outputs = self._outputs.get(node)
        if outputs is None:
            outputs = self._outputs[node] = self._outputs_of(self._nodes[node])
        start, count = outputs.get(output[0], (0, 0))
        index = output[1] if len(output) > 1 else "0"
        self._check(is_index(index) and int(index) < count, name, reader)
        return output_name(node, start + int(index))

    def _check(self, holds: bool, name: str, reader: str) -> None:
        if not holds:
            raise TransformError(
                f"'{reader}' of function '{self._function}' reads '{name}', which the "
                "function does not hold; its definition is damaged"
            )

    def _outputs_of(self, definition: Any) -> dict[str, tuple[int, int]]:
        """Return (first index, number of tensors) of each output of a node."""
        signature = signature_of(definition.op, self._library)
        if signature is None:
            raise TransformError(
                f"op '{definition.op}' of node '{definition.name}' in function "
                f"'{self._function}' is unknown; load the library that defines it with "
                "tf.load_op_library"
            )
        start = 0
        outputs = {}
        for arg in signature.output_arg:
            count = _length(arg, definition, signature)
            outputs[arg.name] = start, count
            start += count
        return outputs


def _length(arg: Any, definition: Any, signature: Any) -> int:
    """Return the number of tensors of an output."""
    if arg.number_attr:
        return _attribute(arg.number_attr, definition, signature).i
    if arg.type_list_attr:
        return len(_attribute(arg.type_list_attr, definition, signature).list.type)
    return 1


def _attribute(name: str, definition: Any, signature: Any) -> Any:
    if name in definition.attr:
        return definition.attr[name]
    for attribute in signature.attr:
        if attribute.name == name and default_of(attribute) is not None:
            return attribute.default_value
    raise TransformError(
        f"node '{definition.name}' ({definition.op}) has no attribute '{name}', which "
        "says how many outputs it has"
    )


def is_index(text: str) -> bool:
    """Return whether `text` is the number of an output."""
    return text.isascii() and text.isdigit() and len(text) < 10


@dataclass(frozen=True)
class Arg:
    """An argument of a function."""

    name: str  # Its name, which nodes of the body read.
    dtype: int  # The number of its `tf.DType`.
    # Its `AttrValue` protos by name: `_output_shapes`, `_handle_shapes`,
    # `_user_specified_name` and others.
    attributes: Mapping[str, Any] = field(repr=False)
    # Dtype and shape of the variable behind a resource, as protos.
    handle_data: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Result:
    """A result of a function."""

    name: str
    tensor: str  # Where it comes from: `node`, `node:k` or the name of an argument.
    dtype: int  # The number of its `tf.DType`.
    handle_data: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class BodyNode:
    """A node of a body: its definition, which names other inputs, and its inputs."""

    definition: Any = field(repr=False)
    inputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the node inside the body."""
        return self.definition.name


@dataclass(frozen=True)
class FlatBody:
    """A function as plain nodes, for one choice of its attributes."""

    name: str
    args: tuple[Arg, ...]
    nodes: tuple[BodyNode, ...] = field(repr=False)
    results: tuple[Result, ...]
    # (name, node) of each op that a call waits for.
    control_results: tuple[tuple[str, str], ...]

    def node_defs(self) -> list[Any]:
        """Return a new `NodeDef` for each node, with the inputs of a `GraphDef`."""
        result = []
        for node in self.nodes:
            copied = NodeDef()
            copied.CopyFrom(node.definition)
            copied.ClearField("input")
            copied.input.extend(node.inputs)
            result.append(copied)
        return result


def flat_body(
    function_def: Any,
    library: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
) -> FlatBody:
    """Return the body of a function as plain nodes."""
    # Definitions are those of `function_def`, not copies, where no attribute had to be
    # filled in: those left out of `attributes` have their defaults.
    signature = function_def.signature
    bound = _bound_attributes(signature, attributes or {})
    definitions = list(function_def.node_def)
    if signature.attr:
        where = f"function '{signature.name}'"
        definitions = [_filled_in(d, bound, where) for d in definitions]
    args = tuple(_args(function_def, bound))
    flat = FlatNames(signature.name, [arg.name for arg in args], definitions, library)
    nodes = tuple(
        BodyNode(d, tuple(flat.of(name, d.name) for name in d.input))
        for d in definitions
    )
    results = []
    for arg in signature.output_arg:
        _refuse_list(signature.name, arg)
        if arg.name not in function_def.ret:
            raise TransformError(
                f"function '{signature.name}' does not say what its result "
                f"'{arg.name}' is; its definition is damaged"
            )
        tensor = flat.of(function_def.ret[arg.name], arg.name)
        dtype = _dtype(signature.name, arg, bound)
        results.append(Result(arg.name, tensor, dtype, tuple(arg.handle_data)))
    controls, control_ret = [], dict(function_def.control_ret)
    # The signature knows their order; functions of older files leave it out.
    for name in dict.fromkeys((*signature.control_output, *sorted(control_ret))):
        controls.append((name, flat.of(f"^{control_ret.get(name, '')}", name)[1:]))
    return FlatBody(signature.name, args, nodes, tuple(results), tuple(controls))


def _args(function_def: Any, bound: Mapping[str, Any]) -> Iterator[Arg]:
    for index, arg in enumerate(function_def.signature.input_arg):
        _refuse_list(function_def.signature.name, arg)
        dtype = _dtype(function_def.signature.name, arg, bound)
        has_attributes = index in function_def.arg_attr
        attributes = dict(function_def.arg_attr[index].attr) if has_attributes else {}
        yield Arg(arg.name, dtype, attributes, tuple(arg.handle_data))


def _dtype(function: str, arg: Any, bound: Mapping[str, Any]) -> int:
    if not arg.type_attr:
        return arg.type
    if arg.type_attr not in bound:
        raise TransformError(
            f"attribute '{arg.type_attr}' of function '{function}' has no value: it "
            f"says the type of '{arg.name}'; give it in attributes"
        )
    return bound[arg.type_attr].type


def _refuse_list(function: str, arg: Any) -> None:
    if has_list(arg):
        raise TransformError(
            f"'{arg.name}' of function '{function}' is a list of tensors; such a "
            "function can be called but not opened: leave its calls as they are"
        )


def has_list(arg: Any) -> bool:
    """Return whether an argument or result of a signature is a list of tensors."""
    return bool(arg.number_attr or arg.type_list_attr)


def _bound_attributes(signature: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {a.name: default_of(a) for a in signature.attr}
    return {name: v for name, v in {**defaults, **attributes}.items() if v is not None}


def _filled_in(definition: Any, bound: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a node with its placeholders replaced by the values bound."""
    filled = NodeDef()
    filled.CopyFrom(definition)
    # An attribute that names a function has attributes of its own, with placeholders.
    waiting = [filled.attr]
    for attributes in waiting:
        for value in attributes.values():
            kind = value.WhichOneof("value")
            if kind == "placeholder":
                if value.placeholder not in bound:
                    raise TransformError(
                        f"attribute '{value.placeholder}' of {where} has no value, and "
                        f"'{definition.name}' needs it; give it in attributes"
                    )
                value.CopyFrom(bound[value.placeholder])
            elif kind == "func":
                waiting.append(value.func.attr)
            elif kind == "list":
                waiting.extend(function.attr for function in value.list.func)
    return filled


T = TypeVar("T", bound=Hashable)


def needs_first(needs: Mapping[T, Iterable[T]]) -> list[T]:
    """Return keys, each after those that it needs; a cycle loses one edge."""
    return topological_order(needs, lambda key: [n for n in needs[key] if n in needs])


def on_cycles(needs: Mapping[T, Iterable[T]]) -> set[T]:
    """Return the keys of `needs` that need themselves, however indirectly."""
    # Kosaraju's algorithm: the components are found by walks against the edges, from
    # the keys whose walk along the edges ended last.
    needed_by: dict[T, list[T]] = {key: [] for key in needs}
    for key, values in needs.items():
        for value in values:
            if value in needed_by:
                needed_by[value].append(key)
    result: set[T] = set()
    seen: set[T] = set()
    for start in reversed(needs_first(needs)):
        if start in seen:
            continue
        component = closure(
            [start], lambda key: [k for k in needed_by[key] if k not in seen]
        )
        seen.update(component)
        if len(component) > 1 or start in needed_by[start]:
            result.update(component)
    return result


def function_values(attributes: Any) -> Iterator[Any]:
    """Yield the `NameAttrList` protos in a map of `AttrValue` protos, nested too."""
    waiting = [attributes]
    for inner in waiting:
        for value in inner.values():
            kind = value.WhichOneof("value")
            for function in [value.func] if kind == "func" else value.list.func:
                yield function
                waiting.append(function.attr)


def functions_of_attributes(attributes: Any) -> Iterator[str]:
    """Yield the names of the functions in a map of `AttrValue` protos."""
    for value in function_values(attributes):
        if value.name:
            yield value.name


def rename_functions(node_def: Any, names: Mapping[str, str]) -> None:
    """Rename the functions in the attributes of a node."""
    for value in function_values(node_def.attr):
        value.name = names.get(value.name, value.name)


def names_of_functions(node: Any) -> Iterator[str]:
    """Yield the name of the op of a node and of the functions in its attributes."""
    yield node.op
    for value in function_values(node.attr):
        yield value.name


def rename_called(node: Any, names: Mapping[str, str]) -> None:
    """Rename the functions that a node calls; its op may be one."""
    node.op = names.get(node.op, node.op)
    rename_functions(node, names)


# Stateful by their signature, but they make a handle or a random number: nobody notices
# whether or when they ran.
_UNNOTICED = frozenset(
    (
        "HashTableV2",
        "Multinomial",
        "MutableHashTableV2",
        "RandomGamma",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
        "VarHandleOp",
        "VariableShape",
        "VariableV2",
    )
)
# Nobody notices whether they ran, but what they see depends on when.
_READS = frozenset(
    (
        "DisableCopyOnRead",
        "IsVariableInitialized",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
    )
)
# Stateful by their signature, and made for what they yield.
_GIVEN = frozenset(("IteratorGetNext", "IteratorV2", "Placeholder"))
# They read a variable of version 1, or hand it on.
_QUIET_READS = frozenset(
    ("Identity", "IsVariableInitialized", "RefEnter", "RefIdentity", "RefSwitch")
)
# They do what a function of theirs does.
_AS_THEIR_FUNCTIONS = frozenset(
    (
        "Case",
        "If",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "SymbolicGradient",
        "While",
    )
)


class Effects:
    """Tells which nodes have an effect, given the functions that they may call."""

    # With `reads`, a read of a variable or table counts as an effect, too.

    def __init__(self, functions: Mapping[str, Any], *, reads: bool = False) -> None:
        self._functions = functions
        self._reads = reads
        callers: dict[str, list[str]] = {}
        effective_names: dict[str, None] = {}
        for name, function in functions.items():
            for node in function.node_def:
                if self.depends(node):
                    for called in names_of_functions(node):
                        callers.setdefault(called, []).append(name)
                if self._by_itself(node):
                    effective_names[name] = None
        # Effects pass from functions to their callers until no new function has one.
        self._found = closure(effective_names, lambda name: callers.get(name, ()))

    def of(self, node: Any) -> bool:
        """Return whether a node has an effect."""
        return self._by_itself(node) or (
            self.depends(node)
            and any(name in self._found for name in names_of_functions(node))
        )

    def is_kernel(self, node: Any) -> bool:
        """Return whether a node is an op that only computes."""
        signature = signature_of(node.op, {})
        return not (self.depends(node) or signature is None or signature.is_stateful)

    def depends(self, node: Any) -> bool:
        """Return whether a node has the effects of its functions, and no others."""
        return node.op in _AS_THEIR_FUNCTIONS or node.op in self._functions

    def _by_itself(self, node: Any) -> bool:
        if self.depends(node):
            # An attribute of the function decides what is called.
            return any(
                value.WhichOneof("value") == "placeholder" and name in _FUNCTION
                for name, value in node.attr.items()
            )
        if node.op in _UNNOTICED:
            return False
        if node.op in _READS:
            return self._reads
        signature = signature_of(node.op, {})
        return signature is None or signature.is_stateful


_FUNCTION = frozenset(("f", "body", "cond", "then_branch", "else_branch", "branches"))


def changes_state(op: Operation) -> bool:
    """Return whether an op changes state that others see: a variable, a file."""
    # A call counts if TensorFlow calls it stateful; its function is not looked at.
    if any(is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return op.type not in _QUIET_READS
    definition = op.op_def
    stateful = definition is None or bool(definition.is_stateful)
    return stateful and op.type not in _UNNOTICED | _READS | _GIVEN


Instance: TypeAlias = tuple[str, tuple[tuple[str, bytes], ...]]
"""A function, and the attributes that it is polymorphic in."""

# Written by tf.function itself; TensorFlow does not heed it.
_OWN_GRADIENT = re.compile(rb"(Stateful)?PartitionedCall-\d+")


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, with values for its polymorphic attributes."""

    function: str
    # The attributes that the function is polymorphic in.
    attributes: Mapping[str, Any] = field(repr=False)

    @property
    def instance(self) -> Instance:
        """Return the function and its attributes as a key."""
        values = sorted(self.attributes.items())
        return self.function, tuple(
            (name, value.SerializeToString(deterministic=True))
            for name, value in values
        )


class Library:
    """The functions of a `GraphDef`, by name."""

    def __init__(self, library: Any) -> None:
        self.functions = {f.signature.name: f for f in library.function}
        self.gradients = {g.function_name: g.gradient_func for g in library.gradient}
        self._library = library

    def call(self, node: Any) -> FunctionCall | None:
        """Return the call of a node, or None when it is none."""
        if node.op in self.functions:
            name, attributes = node.op, node.attr
        elif node.op in op_types.CALLS or node.op == "SymbolicGradient":
            name, attributes = node.attr["f"].func.name, node.attr["f"].func.attr
        else:
            return None
        if name not in self.functions:
            raise TransformError(
                f"'{node.name}' calls function '{name}', which the library of the "
                "graph does not hold; add it to graph_def.library"
            )
        # Other attributes of a call, such as its config, make no other instance.
        declared = self.functions[name].signature.attr
        return FunctionCall(
            name, {a.name: attributes[a.name] for a in declared if a.name in attributes}
        )

    def reason_to_keep(self, node: Any, function: str) -> str:
        """Return why a call cannot be replaced by its body, or nothing."""
        definition = self.functions[function]
        signature = definition.signature
        for name, reason in _REASONS.items():
            if node.attr[name].b if name in node.attr else False:
                return f"{reason} ({name} of the call)"
            if definition.attr[name].b if name in definition.attr else False:
                return f"{reason} ({name} of the function)"
        if node.op == "SymbolicGradient":
            return "it calls the gradient of the function, not the function"
        if function in self.gradients:
            return f"its gradient is another function, '{self.gradients[function]}'"
        if "_gradient_op_type" in node.attr and not _OWN_GRADIENT.fullmatch(
            node.attr["_gradient_op_type"].s
        ):
            return "its gradient is overridden (_gradient_op_type of the call)"
        if any(has_list(a) for a in (*signature.input_arg, *signature.output_arg)):
            return "the function takes or returns a list of tensors"
        return ""

    def still_called(self, nodes: Iterable[Any]) -> Any:
        """Return a library of the functions that `nodes` call, however indirectly."""
        library = self._library
        # The runtime finds these by the type of an op: no node calls them.
        registered = [r.gradient_func for r in library.registered_gradients]

        def called(name: str) -> Iterator[str]:
            if name in self.functions:
                for node in self.functions[name].node_def:
                    yield from names_of_functions(node)
            if name in self.gradients:
                yield self.gradients[name]

        starts = (n for node in nodes for n in names_of_functions(node))
        reachable_names = closure([*registered, *starts], called)
        result = FunctionDefLibrary()
        result.function.extend(
            f for f in library.function if f.signature.name in reachable_names
        )
        result.gradient.extend(
            g for g in library.gradient if g.function_name in reachable_names
        )
        result.registered_gradients.extend(library.registered_gradients)
        return result


_REASONS = {
    "_XlaMustCompile": "XLA compiles it as a whole",
    "_noinline": "it is marked to stay a call",
}
