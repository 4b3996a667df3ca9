"""The types that ops of TFLite files compute in, and what weights take by type."""

from __future__ import annotations

from collections.abc import Iterator

from geutil.tflite.old_reading import LiteFile, LiteGraph, LiteOp, LiteTensor

_FLOATS = ("float", "bfloat")
_QUANTIZED = ("int2", "int4", "int8", "int16", "uint4", "uint8")
_CONVERSIONS = frozenset(("CAST", "DEQUANTIZE", "QUANTIZE"))
_NO_NUMBERS = frozenset(("resource", "string", "variant"))
_WIDE = frozenset(("int32", "int64"))
"""Types of biases, sizes and places, which stand beside weights of any type."""


def is_float(dtype: str) -> bool:
    """Tell whether a type is one of floats."""
    return dtype.startswith(_FLOATS)


def precision_of(op: LiteOp, graph: LiteGraph) -> str:
    """Return the type that an op computes in, and that of its weights if it is another.

    The type is that of what it computes from and into; a file's names for it are
    "int8", "float32", "int16 with int8 weights", or "float32 with int8 weights
    (hybrid)" where TFLite quantizes the activations while it runs.

    Args:
        op: the op.
        graph: the subgraph that it is in.

    Cost: linear in the op's inputs and outputs.
    """
    read = [graph.tensors[i] for i in op.inputs if i >= 0]
    made = [graph.tensors[i] for i in op.outputs if i >= 0]
    if op.type in _CONVERSIONS and read and made:
        return f"{read[0].dtype} to {made[0].dtype}"
    computed = [t for t in read if not t.stored_bytes]
    computing = _main_type([*computed, *made])
    weights = _weights_type(read)
    if weights is None or computing is None or weights == computing:
        return computing or "none"
    if is_float(computing) and is_float(weights):
        return f"{computing} with {weights} weights"
    if is_float(computing):
        return f"{computing} with {weights} weights (hybrid)"
    return f"{computing} with {weights} weights"


def computes_in_float(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of floats.

    Conversions from and to floats are none.
    """
    return is_float(precision) and " to " not in precision


def is_quantized(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of quantized numbers."""
    return precision.startswith(_QUANTIZED) and " to " not in precision


def _main_type(tensors: list[LiteTensor]) -> str | None:
    """Return the type that counts of several: floats, then what is quantized."""
    types = [t.dtype for t in tensors]
    floats = [dtype for dtype in types if is_float(dtype)]
    quantized = [t.dtype for t in tensors if t.quantization is not None]
    numbers = [dtype for dtype in types if dtype not in _NO_NUMBERS]
    return next(iter([*floats, *quantized, *numbers, *types]), None)


def _weights_type(read: list[LiteTensor]) -> str | None:
    """Return the type of the largest constant that an op reads, biases apart."""
    weights = [t for t in read if t.stored_bytes and t.dtype not in _WIDE]
    weights = [t for t in weights if is_float(t.dtype) or t.quantization is not None]
    largest = max(weights, key=lambda t: t.stored_bytes, default=None)
    return None if largest is None else largest.dtype


def stored_bytes(file: LiteFile) -> dict[str, int]:
    """Return what the constants of a file take by their type, the largest first.

    Buffers that several tensors share are counted once.
    """
    totals: dict[str, int] = {}
    for tensor in _constants(file):
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.stored_bytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _constants(file: LiteFile) -> Iterator[LiteTensor]:
    seen: set[int] = set()
    for graph in file.graphs:
        for tensor in graph.tensors:
            if tensor.stored_bytes and tensor.buffer not in seen:
                seen.add(tensor.buffer)
                yield tensor
