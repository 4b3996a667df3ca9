"""Compares what is quantized in a model with what computes in int8 in its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geutil.graph.kinds import Operation
from geutil.graph.tflite_files import FileOp
from geutil.quantize.finding.choices import Choices
from geutil.quantize.finding.kernels import FAKE_QUANT
from geutil.quantize.finding.planning import plan_quantization

_CASTS = frozenset(("DEQUANTIZE", "QUANTIZE"))
_DIGITS = "0123456789"
_SIMULATED = sorted(FAKE_QUANT)


def missed(model: Any, float_ops: Sequence[FileOp]) -> list[FileOp]:
    """Return float ops of a file whose values are quantized in the model.

    They are told by the names of the tensors that they make. What TFLite has no int8
    kernel for, or was not quantized, is not among them.

    Args:
        model: the quantized model that the file was made from.
        float_ops: the ops of the file that compute in float.

    Cost: that of planning the quantization of the model again, if there are any.
    """
    computing = [op for op in float_ops if op.kind not in _CASTS]
    if not computing:
        return []
    promised = {op.name for op in _quantized(model)}
    by_name = {op.name: op for op in model.graph.get_operations()}
    return [op for op in computing if _is_promised(op, by_name, promised)]


def _quantized(model: Any) -> list[Operation]:
    """Return the ops that read and make nothing that is left to be quantized."""
    plan = plan_quantization(model.graph, model.outputs.values(), Choices())
    points = [point for group in plan.groups for point in group.points]
    left = {edge.op for point in points for edge in point.readers or ()}
    for point in points:
        if point.readers is None:
            left.update((point.tensor.op, *point.tensor.consumers()))
    kernels = {plan.kernels.get(op, op) for op in left}
    return [op for op, kernel in plan.kernels.items() if kernel not in kernels]


def _is_promised(op: FileOp, by_name: dict[str, Operation], promised: set[str]) -> bool:
    """Tell whether all ops that an op of the file is named after are quantized."""
    parts = (part.partition(":")[0] for part in op.result.split(";"))
    # The converter numbers what it makes of one op, and `deployed` shortens names.
    found = (
        by_name.get(p)
        or by_name.get(p.rstrip(_DIGITS))
        or next(
            (by_name[f"{p}/{q}"] for q in _SIMULATED if f"{p}/{q}" in by_name), None
        )
        for p in parts
    )
    named = [one for one in found if one is not None and not _is_range(one)]
    behind = [o.inputs[0].op if o.type in FAKE_QUANT else o for o in named]
    return bool(behind) and all(one.name in promised for one in behind)


def _is_range(op: Operation) -> bool:
    return op.type == "ReadVariableOp"
