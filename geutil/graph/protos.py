"""Protos and op definitions of TensorFlow, assets, and the owners of resources."""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from google.protobuf import (  # type: ignore[import-untyped]
    text_encoding,
    text_format,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from geutil.graph import _tf
from geutil.graph._tf import AssetFileDef, DataType
from geutil.graph.walks import node_name


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
        for field, content in owner.ListFields():
            if field.message_type is not None:
                values = [content] if hasattr(content, "ListFields") else content
                if field.message_type.GetOptions().map_entry:
                    values = content.values()
                waiting += [v for v in values if hasattr(v, "ListFields")]
            elif isinstance(content, str | bytes):
                setattr(owner, field.name, replaced(field, content))
            elif field.cpp_type == field.CPPTYPE_STRING:
                content[:] = [replaced(field, one) for one in content]
    return not left
