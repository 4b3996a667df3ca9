"""Protos and op definitions that TensorFlow keeps among its private modules."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from geutil.graph import _tf

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

DATA_TYPES: frozenset[int] = frozenset(_tf.DataType.values())
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
