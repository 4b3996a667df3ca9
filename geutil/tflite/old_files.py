"""TFLite flatbuffers: their ops, and the types of what these read and make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geutil.tflite.run import is_tflite, kind_names, schema, type_names

_CUSTOM = 32


@dataclass(frozen=True)
class FileOp:
    """An op of a TFLite file.

    Attributes:
        kind: its type, such as "CONV_2D".
        result: the name of the first tensor that it makes.
        types: the types of the tensors that it reads and makes, in order, such as
            "INT8"; those of constants are among them.
        steps: the sizes of the steps that they are stored in; 0 of those that are
            stored as they are, of those with several the largest.
    """

    kind: str
    result: str
    types: tuple[str, ...]
    steps: tuple[float, ...]

    @property
    def is_float(self) -> bool:
        """Whether it reads or makes floats."""
        return any(name.startswith(("FLOAT", "BFLOAT")) for name in self.types)


def ops_of(blob: bytes) -> list[FileOp]:
    """Return the ops of a TFLite file, of all its subgraphs.

    Raises:
        ValueError: it is no TFLite file.
    """
    if not is_tflite(blob):
        raise ValueError("these bytes are no TFLite file")
    model = schema().Model.GetRootAs(blob, 0)
    codes = [
        op_kind(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())
    ]
    ops = []
    for index in range(model.SubgraphsLength()):
        graph = model.Subgraphs(index)
        for place in range(graph.OperatorsLength()):
            op = graph.Operators(place)
            ops.append(_op(codes[op.OpcodeIndex()], op, graph))
    return ops


def op_kind(code: Any) -> str:
    """Return the type of ops of the schema's `OperatorCode`, such as "CONV_2D"."""
    builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    if builtin == _CUSTOM and code.CustomCode():
        return str(code.CustomCode().decode())
    return kind_names().get(builtin, str(builtin))


def _op(kind: str, op: Any, graph: Any) -> FileOp:
    input_indices = [op.Inputs(i) for i in range(op.InputsLength())]
    output_indices = [op.Outputs(i) for i in range(op.OutputsLength())]
    # Inputs that are left out have the index -1.
    tensors = [graph.Tensors(i) for i in (*input_indices, *output_indices) if i >= 0]
    result = graph.Tensors(output_indices[0]).Name().decode() if output_indices else ""
    types = tuple(type_names()[t.Type()] for t in tensors)
    return FileOp(kind, result, types, tuple(map(_step, tensors)))


def _step(tensor: Any) -> float:
    quantization = tensor.Quantization()
    count = 0 if quantization is None else quantization.ScaleLength()
    return max((float(quantization.Scale(i)) for i in range(count)), default=0.0)
