"""The wire format of protobuf, walked without parsing: kinds of files, messages.

For messages that a parser would copy whole: a file of a gigabyte of weights is walked
over a memory map, and the weights are never touched.

A file's protos are cut from a memory map piece by piece. Small messages are parsed many
at a time; of a large one a copy is made first, without its long values.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from geutil.errors import ModelError

Buffer: TypeAlias = bytes | mmap.mmap

# Wire types of protocol buffers; 3 and 4, groups, are no longer written.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 70
"""Bits of ten bytes, seven each: those of a 64-bit number."""


class Field(NamedTuple):
    """One field of a message."""

    number: int  # Its number in the message's definition.
    kind: int
    at: int
    start: int
    end: int


def fields(buffer: Buffer, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message that lies between `start` and `end`."""
    at = start
    while at < end:
        tag, value = varint(buffer, at, end)
        kind = tag & 7
        if kind == BYTES:
            length, value = varint(buffer, value, end)
            stop = value + length
        elif kind == VARINT:
            _, stop = varint(buffer, value, end)
        elif kind in _FIXED:
            stop = value + _FIXED[kind]
        else:
            raise ModelError(f"no protobuf: unknown wire type {kind} at byte {at}")
        if tag < 8:
            raise ModelError(f"no protobuf: field number 0 at byte {at}")
        if stop > end:
            raise ModelError(
                f"truncated protobuf: the field at byte {at} ends {stop - end} bytes "
                "behind its message"
            )
        yield Field(tag >> 3, kind, at, value, stop)
        at = stop


def varint(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and where it ends."""
    if at < end and buffer[at] < 128:
        return buffer[at], at + 1
    result = shift = 0
    while at < end and shift < _LONGEST_VARINT:
        byte = buffer[at]
        result |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return result, at
        shift += 7
    raise ModelError(f"truncated or damaged protobuf: no whole number at byte {at}")


def length_delimited(number: int, value: bytes) -> bytes:
    """Return a field of bytes, encoded."""
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


GRAPH_DEF, META_GRAPH, SAVED_MODEL = "GraphDef", "MetaGraphDef", "SavedModel"
_LOOKED_AT = 16
"""Fields that tell the kind of a file.

Measured: benchmarks/inspecting.py --fields, 1,500 damaged MetaGraphDefs. By 3 fields
2.1 % are taken for another kind, by 8 fields 1.1 %, by 16 and by more 0.4 %.
"""
_SUBSETS = {
    # Field 1 of a SavedModel is a number, that of the others a message.
    SAVED_MODEL: {(1, VARINT), (2, BYTES)},
    GRAPH_DEF: {(1, BYTES), (2, BYTES), (3, VARINT), (4, BYTES), (5, BYTES)},
    META_GRAPH: {(number, BYTES) for number in range(1, 8)},
}
_OP_TYPE = re.compile(rb"[A-Za-z0-9.>_]+")
_TEXT_KINDS = {
    "node": GRAPH_DEF,
    "versions": GRAPH_DEF,
    "library": GRAPH_DEF,
    "meta_info_def": META_GRAPH,
    "graph_def": META_GRAPH,
    "saver_def": META_GRAPH,
    "collection_def": META_GRAPH,
    "signature_def": META_GRAPH,
    "saved_model_schema_version": SAVED_MODEL,
    "meta_graphs": SAVED_MODEL,
}
_FIRST_KEY = re.compile(r"(?:\s|#.*\n)*([a-z_]+)\s*[:{<]")


def binary_kind(buffer: Buffer) -> str | None:
    """Return which of the three protos `buffer` holds, by the shape of its fields."""
    first: list[Field] = []
    wire_tags = set()
    graph: Field | None = None
    for field in fields(buffer, 0, len(buffer)):
        wire_tags.add((field.number, field.kind))
        if graph is None and (field.number, field.kind) == (2, BYTES):
            graph = field
        if len(first) < _LOOKED_AT:
            first.append(field)
    # In a SavedModel alone, field 1 is a number: the version of its schema.
    if (1, VARINT) in wire_tags:
        return SAVED_MODEL if wire_tags <= _SUBSETS[SAVED_MODEL] else None
    if _are_nodes(buffer, [f for f in first if f.number == 1]):
        return GRAPH_DEF
    if graph is not None and wire_tags <= _SUBSETS[META_GRAPH]:
        inner = list(islice(fields(buffer, graph.start, graph.end), _LOOKED_AT))
        if _are_nodes(buffer, [f for f in inner if f.number == 1]):
            return META_GRAPH
    return GRAPH_DEF if wire_tags <= _SUBSETS[GRAPH_DEF] else None


def text_kind(text: str) -> str | None:
    """Return which of the three protos `text` writes down, by its first field."""
    match = _FIRST_KEY.match(text)
    return _TEXT_KINDS.get(match[1]) if match else None


def _are_nodes(buffer: Buffer, candidates: list[Field]) -> bool:
    """Return whether most of the fields look like a NodeDef: one may be damaged."""
    return 2 * sum(_is_node(buffer, f) for f in candidates) > len(candidates)


def _is_node(buffer: Buffer, field: Field) -> bool:
    """Return whether a field looks like a NodeDef: it has an op type."""
    try:
        inner = list(fields(buffer, field.start, field.end))
    except ModelError:
        return False
    ops = [f for f in inner if f.number == 2]
    return len(ops) == 1 and all(
        f.kind == BYTES and _OP_TYPE.fullmatch(buffer[f.start : f.end]) for f in ops
    )


Span: TypeAlias = tuple[int, int]
"""Where a message lies in a buffer."""

_LARGE = 1 << 14
"""Bytes beyond which a message is not parsed with its neighbours, nor a value kept."""

_BATCH = 1 << 18
"""Bytes of neighbours that are parsed at a time.

Measured: benchmarks/inspecting.py --batches, 38 MiB of nodes. From 2^12 to 2^20 the CPU
seconds are the same within 3 %; 2^18 takes 3 MiB of memory, 2^20 14 and 2^22 60.
"""
_DEEPEST = 100
"""The depth of messages that protobuf's own parsers accept."""


@contextmanager
def mapped(file: Path) -> Iterator[Buffer]:
    """Map the bytes of a file into memory: only the parts looked at are read."""
    try:
        if not file.stat().st_size:
            raise ModelError(f"'{file}' is empty")
        with file.open("rb") as handle:
            view = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    with view:
        yield view


def spans(buffer: Buffer, span: Span, field: str | int) -> list[Span]:
    """Return where the messages in a field of the message at `span` lie."""
    # Fields of `MESSAGES` go by name, as "GraphDef.library"; others by number.
    if isinstance(field, str):
        name, _, key = field.partition(".")
        number, _ = MESSAGES[name][key]
    else:
        number = field
    return [
        (f.start, f.end)
        for f in fields(buffer, *span)
        if f.number == number and f.kind == BYTES
    ]


def message(buffer: Buffer, span: Span, proto: Any, *numbers: int) -> Any:
    """Parse the message at `span`, with these fields only and without long values."""
    parts = [
        _slim(buffer, field, proto.DESCRIPTOR, 0)[0]
        for field in fields(buffer, *span)
        if field.number in numbers
    ]
    return parsed(proto, b"".join(parts))


def elements(
    buffer: Buffer, span: Span, proto: Any, name: str
) -> Iterator[tuple[Any, int]]:
    """Yield the messages in a repeated field of the message at `span`."""
    # Long values are left out; a batch of elements is in memory at a time.
    number = proto.DESCRIPTOR.fields_by_name[name].number
    start = end = span[0]
    for field in fields(buffer, *span):
        if field.number != number:
            yield from _batch(buffer, (start, end), proto, name)
            start = field.end
        elif field.end - field.at > _LARGE:
            yield from _batch(buffer, (start, end), proto, name)
            start = field.end
            data, left_out = _slim(buffer, field, proto.DESCRIPTOR, 0)
            for element in getattr(parsed(proto, data), name):
                yield element, left_out
        elif field.end - start > _BATCH:
            yield from _batch(buffer, (start, field.end), proto, name)
            start = field.end
        end = field.end
    yield from _batch(buffer, (start, end), proto, name)


def _batch(
    buffer: Buffer, span: Span, proto: Any, name: str
) -> Iterator[tuple[Any, int]]:
    start, end = span
    if start < end:
        # Neighbouring elements make a message by themselves, which C++ parses.
        for element in getattr(parsed(proto, buffer[start:end]), name):
            yield element, 0


def _slim(
    buffer: Buffer, field: Field, descriptor: Any, depth: int
) -> tuple[bytes, int]:
    """Return a field without the long values in it, and how many bytes these take."""
    size = field.end - field.start
    if size <= _LARGE:
        return buffer[field.at : field.end], 0
    field_descriptor = descriptor.fields_by_number.get(field.number)
    inner = None if field_descriptor is None else field_descriptor.message_type
    if inner is None:
        return b"", size
    if depth > _DEEPEST:
        raise ModelError(f"damaged protobuf: messages nested over {_DEEPEST} deep")
    parts, slim_size, left_out = [], 0, 0
    for child in fields(buffer, field.start, field.end):
        part, missing = _slim(buffer, child, inner, depth + 1)
        # Repeated numbers are long together, though each is short.
        if slim_size > _LARGE and _is_scalar(inner, child.number):
            part, missing = b"", child.end - child.start
        parts.append(part)
        slim_size += len(part)
        left_out += missing
    return length_delimited(field.number, b"".join(parts)), left_out


def _is_scalar(descriptor: Any, number: int) -> bool:
    field_descriptor = descriptor.fields_by_number.get(number)
    return field_descriptor is None or field_descriptor.message_type is None


def parsed(proto: Any, data: bytes) -> Any:
    """Parse a message."""
    try:
        return proto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"truncated or damaged protobuf: {error}") from error


_REPEATED, _MAP = "repeated ", "map "
# TensorFlow's own classes take seconds to import. Those here are made of a table, in a
# pool of their own, and parsed by the same library; fields that the table lacks are
# carried along as bytes. A test compares the table with TensorFlow's definitions.
MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "SavedModel": {"meta_graphs": (2, "repeated MetaGraphDef")},
        "MetaGraphDef": {
            "meta_info_def": (1, "MetaInfoDef"),
            "graph_def": (2, "GraphDef"),
            "saver_def": (3, "SaverDef"),
            "collection_def": (4, "map CollectionDef"),
            "signature_def": (5, "map SignatureDef"),
            "asset_file_def": (6, "repeated AssetFileDef"),
            "object_graph_def": (7, "SavedObjectGraph"),
        },
        "MetaInfoDef": {
            "tags": (4, "repeated string"),
            "tensorflow_version": (5, "string"),
        },
        "SaverDef": {
            "filename_tensor_name": (1, "string"),
            "save_tensor_name": (2, "string"),
            "restore_op_name": (3, "string"),
        },
        "CollectionDef": {"node_list": (1, "NodeList")},
        "NodeList": {"value": (1, "repeated string")},
        "AssetFileDef": {
            "tensor_info": (1, "TensorInfo"),
            "filename": (2, "string"),
        },
        "SignatureDef": {
            "inputs": (1, "map TensorInfo"),
            "outputs": (2, "map TensorInfo"),
        },
        "TensorInfo": {
            "name": (1, "string"),
            "dtype": (2, "int32"),
            "tensor_shape": (3, "TensorShapeProto"),
        },
        "TensorShapeProto": {
            "dim": (2, "repeated Dim"),
            "unknown_rank": (3, "bool"),
        },
        "Dim": {"size": (1, "int64")},
        "GraphDef": {
            "node": (1, "repeated NodeDef"),
            "library": (2, "FunctionDefLibrary"),
        },
        "FunctionDefLibrary": {"function": (1, "repeated FunctionDef")},
        "FunctionDef": {
            "signature": (1, "OpDef"),
            "node_def": (3, "repeated NodeDef"),
            "ret": (4, "map string"),
        },
        "OpDef": {
            "name": (1, "string"),
            "input_arg": (2, "repeated ArgDef"),
            "output_arg": (3, "repeated ArgDef"),
        },
        "ArgDef": {"name": (1, "string")},
        "NodeDef": {
            "name": (1, "string"),
            "op": (2, "string"),
            "input": (3, "repeated string"),
            "attr": (5, "map AttrValue"),
        },
        "AttrValue": {
            "list": (1, "AttrList"),
            "s": (2, "bytes"),
            "tensor": (8, "TensorProto"),
            "func": (10, "NameAttrList"),
        },
        "AttrList": {"s": (2, "repeated bytes"), "func": (9, "repeated NameAttrList")},
        "NameAttrList": {"name": (1, "string")},
        "TensorProto": {"dtype": (1, "int32"), "string_val": (8, "repeated bytes")},
        "SavedObjectGraph": {
            "nodes": (1, "repeated SavedObject"),
            "concrete_functions": (2, "map SavedConcreteFunction"),
        },
        "SavedConcreteFunction": {"bound_inputs": (2, "repeated int32")},
        "SavedObject": {
            "children": (1, "repeated ObjectReference"),
            "asset": (5, "SavedAsset"),
            "function": (6, "SavedFunction"),
            "variable": (7, "SavedVariable"),
            "bare_concrete_function": (8, "SavedBareConcreteFunction"),
            "saveable_objects": (11, "map SaveableObject"),
        },
        "ObjectReference": {"node_id": (1, "int32"), "local_name": (2, "string")},
        "SavedAsset": {"asset_file_def_index": (1, "int32")},
        "SavedFunction": {"concrete_functions": (1, "repeated string")},
        "SavedBareConcreteFunction": {"concrete_function_name": (1, "string")},
        "SaveableObject": {
            "save_function": (2, "int32"),
            "restore_function": (3, "int32"),
        },
        "SavedVariable": {
            "dtype": (1, "int32"),
            "shape": (2, "TensorShapeProto"),
            "trainable": (3, "bool"),
            "name": (6, "string"),
        },
        "BundleEntryProto": {
            "dtype": (1, "int32"),
            "shape": (2, "TensorShapeProto"),
        },
    }
)
"""For each message the number and the type of its fields; keys of maps are strings."""

_TYPES = (
    *("", "float32", "float64", "int32", "uint8", "int16", "int8", "string"),
    *("complex64", "int64", "bool", "qint8", "quint8", "qint32", "bfloat16"),
    *("qint16", "quint16", "uint16", "complex128", "float16", "resource", "variant"),
    *("uint32", "uint64", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2"),
    "float4_e2m1fn",
)
REFERENCE = 100
"""Added to the number of a type for a reference to a variable of it."""


def type_name(number: int) -> str | None:
    """Return TensorFlow's name of a data type by its number, or None."""
    plain = number % REFERENCE
    if number < 0 or number // REFERENCE > 1 or not 0 < plain < len(_TYPES):
        return None
    return _TYPES[plain] + ("_ref" if number > REFERENCE else "")


@cache
def message_class(name: str) -> Any:
    """Return the class of a message of the table."""
    descriptor = _pool().FindMessageTypeByName(f"{_PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_pool()).GetPrototype(descriptor)


_PACKAGE = "geutil"
_FIELD = descriptor_pb2.FieldDescriptorProto


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(
        name="geutil.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            if kind.startswith(_MAP):
                _add_map(message, key, number, kind.removeprefix(_MAP))
            else:
                _add_field(message, key, number, kind)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    repeated = kind.startswith(_REPEATED)
    kind = kind.removeprefix(_REPEATED)
    field = message.field.add(
        name=name,
        number=number,
        label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL,
    )
    if kind in MESSAGES or "." in kind:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = kind if "." in kind else f".{_PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


def _add_map(message: Any, name: str, number: int, kind: str) -> None:
    """A map is a repeated message of a key and a value, by a name that is fixed."""
    entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    nested = message.nested_type.add(name=entry)
    nested.options.map_entry = True
    _add_field(nested, "key", 1, "string")
    _add_field(nested, "value", 2, kind)
    where = f".{_PACKAGE}.{message.name}.{entry}"
    _add_field(message, name, number, f"{_REPEATED}{where}")
