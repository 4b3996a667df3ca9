"""What kind of file this is, told by its first bytes and its protobuf fields."""

from __future__ import annotations

import re
from itertools import islice

from geutil.model.errors import ModelError
from geutil.model.files.wire import BYTES, VARINT, Buffer, Field, fields

GRAPH_DEF, META_GRAPH, SAVED_MODEL = "GraphDef", "MetaGraphDef", "SavedModel"
_MAGIC = {
    b"PK\x03\x04": "a zip archive (a .keras file is one: name it so)",
    b"\x89HDF": "an HDF5 file (a model of Keras is one: name it .h5)",
    b"\x1f\x8b": "a gzip archive (unpack it first)",
}
_TFLITE = b"TFL3"
_LOOKED_AT = 16
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


def foreign_kind(head: bytes) -> str | None:
    """Return what a file is by its first bytes, if it is none of ours."""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[4:8] == _TFLITE:
        return (
            "a TensorFlow Lite model (run it with an interpreter, such as that of "
            "ai_edge_litert, and open the model that it was made from)"
        )
    return None


def binary_kind(buffer: Buffer) -> str | None:
    """Return which of the three protos `buffer` holds, by the shape of its fields.

    Raises:
        ModelError: it holds no protobuf, or a part of one.

    Cost: linear in the top fields.
    """
    first: list[Field] = []
    seen = set()
    for field in fields(buffer, 0, len(buffer)):
        seen.add((field.number, field.kind))
        if len(first) < _LOOKED_AT:
            first.append(field)
    if (1, VARINT) in seen:
        return SAVED_MODEL if seen <= _SUBSETS[SAVED_MODEL] else None
    if _are_nodes(buffer, [f for f in first if f.number == 1]):
        return GRAPH_DEF
    if (2, BYTES) in seen and seen <= _SUBSETS[META_GRAPH]:
        graph = next(f for f in first if f.number == 2)
        inner = list(islice(fields(buffer, graph.start, graph.end), _LOOKED_AT))
        if _are_nodes(buffer, [f for f in inner if f.number == 1]):
            return META_GRAPH
    return GRAPH_DEF if seen <= _SUBSETS[GRAPH_DEF] else None


def text_kind(text: str) -> str | None:
    """Return which of the three protos `text` writes down, by its first field."""
    match = _FIRST_KEY.match(text)
    return _TEXT_KINDS.get(match[1]) if match else None


def _are_nodes(buffer: Buffer, found: list[Field]) -> bool:
    """Tell whether most of the fields look like a NodeDef: one may be damaged."""
    return 2 * sum(_is_node(buffer, f) for f in found) > len(found)


def _is_node(buffer: Buffer, field: Field) -> bool:
    """Tell whether a field looks like a NodeDef: it has an op type."""
    try:
        inner = list(fields(buffer, field.start, field.end))
    except ModelError:
        return False
    ops = [f for f in inner if f.number == 2]
    return len(ops) == 1 and all(
        f.kind == BYTES and _OP_TYPE.fullmatch(buffer[f.start : f.end]) for f in ops
    )
