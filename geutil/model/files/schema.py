"""The protos of model files, without TensorFlow: the fields that inspections look at.

TensorFlow's own classes take seconds to import. Those here are made of a table, in a
pool of their own, and parsed by the same library; fields that the table lacks are
carried along as bytes. A test compares the table with TensorFlow's definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

_REPEATED, _MAP = "repeated ", "map "
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
