"""Which tensor holds what another one is quantized to."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import SELECTS
from geutil.quantize.finding.kernels import FAKE_QUANT
from geutil.transform.rewrite.liveness import Liveness


def quantized_value(tensor: Tensor) -> Tensor | None:
    """Return what a tensor is quantized to; None if it is not quantized.

    With a delay, that is what chooses between the tensor and its quantized values.

    Cost: linear in the readers of the tensor.
    """
    live = Liveness(tensor.graph)
    for reader in _readers(tensor, live):
        # Channels of several axes are brought together, and taken apart again.
        found = _behind(reader, live) if reader.type == "Reshape" else reader
        if found is not None and found.type in FAKE_QUANT:
            result = _reshaped_back(found, tensor, reader, live)
            return _chosen(result, tensor, live)
    return None


def _readers(tensor: Tensor, live: Liveness) -> list[Operation]:
    """Return the ops that read a tensor first of all."""
    consumers = tensor.consumers()
    return [
        op for op in consumers if op.inputs[0] is tensor and not live.is_retired(op)
    ]


def _behind(op: Operation, live: Liveness) -> Operation | None:
    readers = _readers(op.outputs[0], live)
    return readers[0] if len(readers) == 1 else None


def _reshaped_back(
    found: Operation, tensor: Tensor, reader: Operation, live: Liveness
) -> Tensor:
    result = found.outputs[0]
    if reader is found:
        return result
    back = _behind(found, live)
    return result if back is None or back.type != "Reshape" else back.outputs[0]


def _chosen(result: Tensor, tensor: Tensor, live: Liveness) -> Tensor:
    for op in result.consumers():
        if op.type in SELECTS and op.inputs[1] is result and op.inputs[2] is tensor:
            return op.outputs[0]
    return result
