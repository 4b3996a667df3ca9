"""Checks of constants, shapes and op signatures, as protos."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import protos
from geutil.graph.protos import DATA_TYPES, OpDef, TensorProto, TensorShapeProto
from geutil.graph.walks import tree
from geutil.model.files.wire import REFERENCE

Types: TypeAlias = tuple[int, ...]
"""Numbers of data types, one for each tensor; UNKNOWN where nothing tells it."""

# DT_INVALID of types.proto.
UNKNOWN = 0
MOST_TENSORS = 2**20
"""No op yields more: a number beyond it is damage, and TensorFlow would allocate it."""


@dataclass(frozen=True)
class Signature:
    """The definition of an op type or of a function."""

    op_def: OpDef

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The declaration of each attribute by name."""
        return {a.name: a for a in self.op_def.attr}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The attributes without a default."""
        return tuple(
            a.name for a in self.op_def.attr if not a.HasField("default_value")
        )

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The input arguments."""
        return tuple(self.op_def.input_arg)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The output arguments."""
        return tuple(self.op_def.output_arg)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the attributes that have one."""
        return {
            a.name: a.default_value
            for a in self.op_def.attr
            if a.HasField("default_value")
        }

    @cached_property
    def fixed_inputs(self) -> Types | None:
        """The types of the inputs, if they are the same for each node."""
        return self._fixed(self.inputs)

    @cached_property
    def fixed_outputs(self) -> Types | None:
        """The types of the outputs, if they are the same for each node."""
        return self._fixed(self.outputs)

    def _fixed(self, args: Sequence[Any]) -> Types | None:
        if all(a.type and not a.number_attr for a in args):
            return tuple(base_type(a.type) for a in args)
        return None

    def input_types(self, attributes: Mapping[str, Any]) -> Types | None:
        """Return the types of a node's inputs, or None if their number is unknown."""
        if self.fixed_inputs is not None:
            return self.fixed_inputs
        return self._flat(self.inputs, attributes)

    def output_types(self, attributes: Mapping[str, Any]) -> Types | None:
        """Return the types of a node's outputs; see `input_types`."""
        if self.fixed_outputs is not None:
            return self.fixed_outputs
        return self._flat(self.outputs, attributes)

    def named_outputs(self, attributes: Mapping[str, Any]) -> dict[str, Types | None]:
        """Return the types of each output argument by its name."""
        return {arg.name: self._arg(arg, attributes) for arg in self.outputs}

    def _flat(self, args: Sequence[Any], attributes: Mapping[str, Any]) -> Types | None:
        flat: list[int] = []
        for arg in args:
            types = self._arg(arg, attributes)
            if types is None:
                return None
            flat += types
        return tuple(flat)

    def _arg(self, arg: Any, attributes: Mapping[str, Any]) -> Types | None:
        """Return the types of the tensors of an argument, or None if unknown."""
        if arg.type_list_attr:
            value = self._value(arg.type_list_attr, attributes)
            if value is None or value.WhichOneof("value") != "list":
                return None
            return tuple(base_type(t) for t in value.list.type)
        kind = base_type(arg.type)
        if arg.type_attr:
            value = self._value(arg.type_attr, attributes)
            kind = UNKNOWN if value is None else base_type(value.type)
        if not arg.number_attr:
            return (kind,)
        value = self._value(arg.number_attr, attributes)
        if value is None or value.WhichOneof("value") != "i":
            return None
        # A damaged number would make a tuple that no memory holds.
        if not 0 <= value.i <= MOST_TENSORS:
            raise ModelError(
                f"attribute '{arg.number_attr}' asks for {value.i} tensors; accepted "
                f"are 0 to {MOST_TENSORS}"
            )
        return (kind,) * value.i

    def _value(self, name: str, attributes: Mapping[str, Any]) -> Any:
        value = attributes.get(name)
        return self.defaults.get(name) if value is None else value


class OpSignatures:
    """Looks op types up: functions of a library first, then TensorFlow's own ops."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        self._known: dict[str, Signature | None] = {}

    def get(self, op_type: str) -> Signature | None:
        """Return the signature of an op type, or None if nobody knows it."""
        try:
            return self._known[op_type]
        except KeyError:
            pass
        function = self.functions.get(op_type)
        op_def = protos.op_def_of(op_type) if function is None else function.signature
        signature = None if op_def is None else Signature(op_def)
        self._known[op_type] = signature
        return signature


def base_type(number: int) -> int:
    """Return the number of a data type without its mark for references."""
    return number - REFERENCE if number > REFERENCE else number


MOST_BYTES = 2**31
"""The most bytes of a constant: one stored in full cannot be larger."""

MOST_DIMENSIONS = 254
"""As TensorFlow's `TensorShape::MaxDimensions`."""
# TensorFlow counts elements in int64.
_MOST_ELEMENTS = 2**63 - 1
_STRING_BYTES = 24
"""Bytes of TensorFlow's `tstring`, without the text of a long one."""

_VALUES: dict[tf.DType, str] = {
    tf.float32: "float_val",
    tf.float64: "double_val",
    tf.int32: "int_val",
    tf.uint8: "int_val",
    tf.int16: "int_val",
    tf.int8: "int_val",
    tf.uint16: "int_val",
    tf.qint8: "int_val",
    tf.quint8: "int_val",
    tf.qint16: "int_val",
    tf.quint16: "int_val",
    tf.qint32: "int_val",
    tf.string: "string_val",
    tf.complex64: "scomplex_val",
    tf.complex128: "dcomplex_val",
    tf.int64: "int64_val",
    tf.bool: "bool_val",
    tf.float16: "half_val",
    tf.bfloat16: "half_val",
    tf.uint32: "uint32_val",
    tf.uint64: "uint64_val",
    tf.resource: "resource_handle_val",
    tf.variant: "variant_val",
}
# Where each element takes two numbers.
_PAIRS = {tf.complex64, tf.complex128}
# Elements of these have no fixed size in a proto.
_UNSIZED = {tf.string, tf.resource, tf.variant}


def check_type(number: int) -> None:
    """Raise `ModelError` unless `number` is that of a data type."""
    if number not in DATA_TYPES:
        raise ModelError(
            f"holds data type {number}, which TensorFlow {tf.__version__} does not know"
        )


def type_name(number: int) -> str:
    """Return the name of a data type, for messages."""
    dtype = _dtype(number)
    return f"data type {number}" if dtype is None else str(dtype.name)


def check_shape(shape: TensorShapeProto, *, full: bool = False) -> int:
    """Check a shape, and return the product of its known sizes."""
    if full and shape.unknown_rank:
        raise ModelError("holds a constant of unknown shape")
    sizes = [d.size for d in shape.dim]
    if len(sizes) > MOST_DIMENSIONS:
        raise ModelError(
            f"holds a shape of {len(sizes)} dimensions; accepted: {MOST_DIMENSIONS}"
        )
    if sizes and min(sizes) < (0 if full else -1):
        raise ModelError(f"holds a shape with a negative size: {sizes}")
    count = math.prod(size for size in sizes if size >= 0)
    if count > _MOST_ELEMENTS or any(size > _MOST_ELEMENTS for size in sizes):
        raise ModelError(f"holds a shape of too many elements: {sizes}")
    return count


def check_tensor(tensor: TensorProto) -> None:
    """Check a constant, and the constants within it, if it is a variant."""
    for one in tree([tensor], lambda t: [i for v in t.variant_val for i in v.tensors]):
        _check_one(one)


def _check_one(tensor: TensorProto) -> None:
    """Check the type, the size and the payload of one constant; see `check_tensor`."""
    check_type(tensor.dtype)
    count = check_shape(tensor.tensor_shape, full=True)
    kind = _dtype(tensor.dtype)
    if kind is None:
        return
    size = _STRING_BYTES if kind in _UNSIZED else kind.size
    if count * size > MOST_BYTES:
        raise ModelError(
            f"holds a constant of {count * size} bytes: {kind.name} of shape "
            f"{[d.size for d in tensor.tensor_shape.dim]}; accepted are {MOST_BYTES}"
        )
    content = len(tensor.tensor_content)
    if content:
        if kind not in _UNSIZED and _bits(kind) >= 8 and content != count * size:
            raise ModelError(
                f"holds {content} bytes, but the constant's shape asks for "
                f"{count * size}"
            )
        return
    field = _VALUES.get(kind)
    if field is None:
        return
    values = len(getattr(tensor, field)) // (2 if kind in _PAIRS else 1)
    # Fewer values than elements are legal: the last one is repeated.
    if values > count:
        raise ModelError(
            f"holds {values} values, but the constant's shape asks for {count}"
        )


@functools.cache
def _dtype(number: int) -> tf.DType | None:
    """Return a data type, or None for one without a size."""
    try:
        dtype = tf.dtypes.as_dtype(number)
        sized = dtype in _UNSIZED or dtype.size > 0
    except (TypeError, KeyError, AttributeError):
        return None
    return dtype if sized else None


def _bits(dtype: tf.DType) -> int:
    # int4, uint2, float4_e2m1fn: packed in some places, a byte each in others.
    if any(mark in dtype.name for mark in ("int2", "int4", "float4")):
        return 4
    return int(dtype.size) * 8
