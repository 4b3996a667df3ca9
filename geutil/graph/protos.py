"""Protos and op definitions that TensorFlow keeps among its private modules."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    op_def_pb2,
    tensor_pb2,
    tensor_shape_pb2,
    types_pb2,
)
from tensorflow.core.protobuf import saved_model_pb2, saved_object_graph_pb2
from tensorflow.python.framework import op_def_registry

AttrValue: TypeAlias = attr_value_pb2.AttrValue
FunctionDef: TypeAlias = function_pb2.FunctionDef
FunctionDefLibrary: TypeAlias = function_pb2.FunctionDefLibrary
GraphDef: TypeAlias = tf.compat.v1.GraphDef
MetaGraphDef: TypeAlias = tf.compat.v1.MetaGraphDef
NodeDef: TypeAlias = tf.compat.v1.NodeDef
OpDef: TypeAlias = op_def_pb2.OpDef
SavedModel: TypeAlias = saved_model_pb2.SavedModel
SavedObjectGraph: TypeAlias = saved_object_graph_pb2.SavedObjectGraph
TensorProto: TypeAlias = tensor_pb2.TensorProto
TensorShapeProto: TypeAlias = tensor_shape_pb2.TensorShapeProto

PARSE_ERRORS: tuple[type[Exception], ...] = (
    DecodeError,
    RecursionError,
    text_format.ParseError,
)
"""What parsing a damaged proto raises, binary or text."""

DATA_TYPES: frozenset[int] = frozenset(types_pb2.DataType.values())
"""The numbers of the data types that this TensorFlow knows."""


def op_def_of(op_type: str) -> Any | None:
    """Return the `OpDef` of an op type, or None if this TensorFlow has no such op.

    Ops that `tf.load_op_library` registered are known too.

    Cost: constant; the first look-up of a type parses its definition.
    """
    return op_def_registry.get(op_type)


def parse_text(text: str, message: Any) -> Any:
    """Parse the text form of a proto into `message`, and return it.

    Raises:
        Exception: one of `PARSE_ERRORS`.
    """
    return text_format.Parse(text, message)
