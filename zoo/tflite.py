"""TFLite files: what they hold, and what they compute. It knows nothing of geutil."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

Array = np.ndarray[Any, Any]

_FLOATS = ("FLOAT32", "FLOAT16", "FLOAT64", "BFLOAT16")
_BORDERS = ("QUANTIZE", "DEQUANTIZE")


@dataclass(frozen=True)
class FileOp:
    """An op of a file.

    Attributes:
        kind: its type.
        results: the names of what it makes: several where ops were fused.
        is_float: whether it reads or makes floats.
    """

    kind: str
    results: tuple[str, ...]
    is_float: bool


def file_ops(blob: bytes) -> list[FileOp]:
    """Return the ops of a file but those that only turn floats into integers."""
    return [op for op in _all_ops(blob) if op.kind not in _BORDERS]


def _all_ops(blob: bytes) -> Iterator[FileOp]:
    codes = {v: k for k, v in vars(schema.BuiltinOperator).items() if k[0] != "_"}
    types = {v: k for k, v in vars(schema.TensorType).items() if k[0] != "_"}
    model = schema.Model.GetRootAs(blob, 0)
    for index in range(model.SubgraphsLength()):
        graph = model.Subgraphs(index)
        for place in range(graph.OperatorsLength()):
            op = graph.Operators(place)
            code = model.OperatorCodes(op.OpcodeIndex())
            kind = codes[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
            made = [graph.Tensors(op.Outputs(i)) for i in range(op.OutputsLength())]
            read = [op.Inputs(i) for i in range(op.InputsLength())]
            tensors = [*made, *(graph.Tensors(i) for i in read if i >= 0)]
            names = [n for t in made for n in t.Name().decode().split(";")]
            is_float = any(types[t.Type()] in _FLOATS for t in tensors)
            yield FileOp(kind, tuple(names), is_float)


def run(blob: bytes, sample: Mapping[str, Array]) -> dict[str, Array]:
    """Run a file on floats: they are rounded to its steps, and its results are floats.

    Inputs are found by name, or in order where the file calls them otherwise.
    """
    interpreter = Interpreter(
        model_content=blob,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    runner = interpreter.get_signature_runner()
    details = runner.get_input_details()
    by_name = set(details) == set(sample)
    order = details if by_name else sample
    names = dict(zip(details, order, strict=True))
    given = {n: _stored(sample[names[n]], detail) for n, detail in details.items()}
    found = runner(**given)
    results = runner.get_output_details()
    return {name: _value(found[name], results[name]) for name in found}


def _stored(value: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero = detail["quantization"]
    if not scale:
        return np.asarray(value, detail["dtype"])
    limits = np.iinfo(detail["dtype"])
    levels = np.round(np.asarray(value, np.float64) / scale) + zero
    return np.clip(levels, limits.min, limits.max).astype(detail["dtype"])


def _value(stored: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero = detail["quantization"]
    return stored if not scale else ((stored.astype(np.float32) - zero) * scale)
