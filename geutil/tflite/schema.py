"""The schema of TFLite files: LiteRT's where that is installed, else TensorFlow's.

The generated classes need flatbuffers and numpy alone; TensorFlow is not imported.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module, util
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np

FAULTS = (
    # Of struct and numpy where an offset leads out of the file; of text; of unions.
    struct.error,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""The errors of flatbuffers that cannot be read or written."""
IDENTIFIER = b"TFL3"
CUSTOM = "CUSTOM"
"""The kind of ops that have no kernel in TFLite; each has a name of its own."""
_MODULE = "tensorflow.lite.python.schema_py_generated"
PACKED_BITS: Mapping[str, int] = {"int2": 2, "int4": 4, "uint4": 4}
"""The bits of types of which a byte holds several values, the first one low."""
_ENUMERATIONS = {
    "fused_activation_function": "ActivationFunctionType",
    "in_data_type": "TensorType",
    "mode": "MirrorPadMode",
    "out_data_type": "TensorType",
    "output_type": "TensorType",
    "padding": "Padding",
    "quantized_bias_type": "TensorType",
}
"""Options that are written as words, by the schema's enumeration of these."""
_OPTIONS = {
    kind: table
    for table, kinds in {
        "Conv3D": "CONV_3D_TRANSPOSE",
        "L2Norm": "L2_NORMALIZATION",
        "MaximumMinimum": "MAXIMUM MINIMUM",
        "Pool2D": "AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D",
        "Random": "MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM",
        "Reducer": "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM",
        "SequenceRNN": "UNIDIRECTIONAL_SEQUENCE_RNN",
    }.items()
    for kind in kinds.split()
}
"""Kinds of ops whose table of options is not called after them."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set: the kinds that a table is for."""
    return frozenset(text.split())


_NAMES_OF_NUMPY = """
    bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16
    uint32 uint64 uint8
"""
DTYPES: Mapping[str, Any] = {
    name: np.dtype(name).type for name in _NAMES_OF_NUMPY.split()
}
"""numpy's types of the types of tensors; others are packed, or have none."""


@cache
def schema() -> Any:
    """Return the module of the flatbuffer classes that are generated for TFLite."""
    try:
        return import_module("ai_edge_litert.schema_py_generated")
    except ImportError:
        return _schema_of_tensorflow()


def _schema_of_tensorflow() -> Any:
    """Load the module from its file, since importing its package takes seconds."""
    package = util.find_spec("tensorflow")
    places = () if package is None else package.submodule_search_locations or ()
    for place in places:
        file = Path(place, *_MODULE.split(".")[1:]).with_suffix(".py")
        spec = util.spec_from_file_location("geutil_tflite_schema", file)
        if file.exists() and spec is not None and spec.loader is not None:
            module = util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return import_module(_MODULE)


def knows_blocks() -> bool:
    """Return whether the schema that is installed has steps for blocks."""
    return hasattr(schema(), "BlockwiseQuantizationT")


@cache
def words_of(enumeration: str) -> dict[int, str]:
    """Return the words of an enumeration of the schema by their numbers."""
    return {
        value: word
        for word, value in vars(getattr(schema(), enumeration)).items()
        if word[0] != "_"
    }


def kind_names() -> dict[int, str]:
    """Return the names of the kinds of ops, such as "CONV_2D", by their numbers."""
    return words_of("BuiltinOperator")


@cache
def type_names() -> dict[int, str]:
    """Return the names of the types of tensors, such as "int8", by their numbers."""
    return {n: word.lower() for n, word in words_of("TensorType").items()}


@cache
def type_numbers() -> dict[str, int]:
    """Return the numbers of the types of tensors by their names."""
    return {word: number for number, word in type_names().items()}


def kind_number(kind: str) -> int:
    """Return the number of a kind of ops."""
    numbers = vars(schema().BuiltinOperator)
    if kind not in numbers or kind[0] == "_":
        raise KeyError(kind)
    return int(numbers[kind])


@cache
def options_table(kind: str) -> str | None:
    """Return the name of the table of options that a kind of ops has; None without.

    Example:
        >>> from geutil.tflite.schema import options_table
        >>> options_table("AVERAGE_POOL_2D"), options_table("RELU")
        ('Pool2DOptions', None)
    """
    named = _OPTIONS.get(kind) or "".join(
        part.capitalize() for part in re.split(r"_|(?<=\d)(?=[A-Z])", kind)
    )
    wanted = f"{named}Options"
    tables = {
        name.lower(): name
        for union in ("BuiltinOptions", "BuiltinOptions2")
        for name in vars(getattr(schema(), union, object))
        if name[0] != "_"
    }
    return tables.get(wanted.lower())


@cache
def option_names(table: str) -> dict[str, str]:
    """Return the names of the options of a table by those of its object's attributes.

    The schema writes `stride_w`; its Python objects have `strideW`.
    """
    attributes = vars(getattr(schema(), f"{table}T")())
    return {name: re.sub(r"([A-Z])", r"_\1", name).lower() for name in attributes}


def option_word(name: str, value: Any) -> Any:
    """Return the value of an option, a word where the schema has one."""
    if name in _ENUMERATIONS and isinstance(value, int):
        return words_of(_ENUMERATIONS[name]).get(value, value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def option_number(name: str, value: Any) -> Any:
    """Return the value of an option as the file has it."""
    if name in _ENUMERATIONS and isinstance(value, str):
        numbers = {word: n for n, word in words_of(_ENUMERATIONS[name]).items()}
        return numbers[value]
    return value


def option_fault(table: str | None, name: str, value: Any) -> str:
    """Return why ops with a table of options cannot have one; "" if they can."""
    known = {option: a for a, option in option_names(table).items()} if table else {}
    if table is None or name not in known:
        listed = f"its options are {[*known]}" if known else "it has none"
        return f"has no option '{name}'; {listed}"
    # A subgraph gets its number only when the file is written.
    if is_call(name) or name == _BRANCHES:
        values = value if isinstance(value, list) else [value]
        if all(v is None or isinstance(v, int) or hasattr(v, "ops") for v in values):
            return ""
        return f"cannot have {value!r} as its option '{name}', which is a subgraph"
    try:
        number = option_number(name, value)
        # A list cannot be hashed, so it goes past the cache.
        packs = _packs if isinstance(number, bool | int | float) else _packs.__wrapped__
        if packs(table, known[name], number):
            return ""
    except KeyError:
        pass
    words = [*words_of(_ENUMERATIONS[name]).values()] if name in _ENUMERATIONS else []
    listed = f"; it is one of {words}" if words else ""
    return f"cannot have {value!r} as its option '{name}'{listed}"


# Typed: 1.0 is no whole number, and equals one.
@lru_cache(4096, typed=True)
def _packs(table: str, attribute: str, value: Any) -> bool:
    """Return whether a file can hold a value in a table of options."""
    record = getattr(schema(), f"{table}T")()
    setattr(record, attribute, value)
    try:
        record.Pack(flatbuffers.Builder(64))
    except FAULTS:
        return False
    return True


_BRANCHES = "branch_subgraph_indices"


@cache
def field_count(table: str) -> int:
    """Return how many fields the schema has for a table."""

    class Counter:
        def StartObject(self, count: int) -> None:  # noqa: N802
            self.count = count

    counter = Counter()
    getattr(schema(), f"{table}Start")(counter)
    return counter.count


def is_call(option: str) -> bool:
    """Return whether an option holds the number of a subgraph."""
    return option.endswith(("subgraph_index", "subgraph"))
