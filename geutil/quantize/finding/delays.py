"""Finds the ops that choose between a tensor and what it is quantized to."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import SELECTS
from geutil.quantize.finding.kernels import FAKE_QUANT


def delayed_input(op: Operation) -> Tensor | None:
    """Return the tensor that an op hands on until quantization starts.

    None if it is another op: one that chooses between two tensors of the network, say.
    """
    if op.type not in SELECTS:
        return None
    quantized = op.inputs[1]
    while quantized.op.type == "Reshape":
        quantized = quantized.op.inputs[0]
    if quantized.op.type not in FAKE_QUANT:
        return None
    source, exact = quantized.op.inputs[0], op.inputs[2]
    while source is not exact and source.op.type == "Reshape":
        source = source.op.inputs[0]
    return exact if source is exact else None
