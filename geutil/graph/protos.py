"""Protos and op definitions of TensorFlow, assets, and the owners of resources."""

from __future__ import annotations

import gc
from typing import Any, TypeAlias

import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from geutil.graph import _tf
from geutil.graph._tf import AssetFileDef, DataType


def new_trackable() -> Any:
    """Return an object whose attributes are saved in a SavedModel."""
    return tf.__internal__.tracking.AutoTrackable()


def owner_of(handle: Any) -> Any:
    """Return the object that holds a resource handle as its `resource_handle`.

    A function captures the handle of a table and not the table; TensorFlow can save the
    table only. None if no such object is alive.

    Cost: one scan of the objects that refer to the handle.
    """
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
    """Return the file in `assets/` for each constant node that names one.

    Version 1 keeps the definitions in a collection.
    """
    definitions = list(meta_graph.asset_file_def)
    if _COLLECTION in meta_graph.collection_def:
        for packed in meta_graph.collection_def[_COLLECTION].any_list.value:
            definition = AssetFileDef()
            if packed.Unpack(definition):
                definitions.append(definition)
    return {d.tensor_info.name.partition(":")[0]: d.filename for d in definitions}


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
"""What parsing a damaged proto raises, binary or text."""

DATA_TYPES: frozenset[int] = frozenset(DataType.values())
"""The numbers of the data types that this TensorFlow knows."""


def op_def_of(op_type: str) -> Any | None:
    """Return the `OpDef` of an op type, or None if this TensorFlow has no such op.

    Ops that `tf.load_op_library` registered are known too.

    Cost: constant; the first look-up of a type parses its definition.
    """
    return _tf.get_op_def(op_type)


def parse_text(text: str, message: Any) -> Any:
    """Parse the text form of a proto into `message`, and return it.

    Raises:
        Exception: one of `PARSE_ERRORS`.
    """
    return text_format.Parse(text, message)
