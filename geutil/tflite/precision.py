"""The types that ops of TFLite files compute in, and what weights take by type."""

from __future__ import annotations

from collections.abc import Sequence

from geutil.tflite.parts import Contents, LiteOp, LiteTensor

_FLOATS = ("float", "bfloat")
_QUANTIZED = ("int2", "int4", "int8", "int16", "uint4", "uint8")
_CONVERSIONS = frozenset(("CAST", "DEQUANTIZE", "QUANTIZE"))
_NO_NUMBERS = frozenset(("resource", "string", "variant"))
_WIDE = frozenset(("int32", "int64"))
"""Types of biases, sizes and places, which stand beside weights of any type."""


def is_float(dtype: str) -> bool:
    """Tell whether a type is one of floats."""
    return dtype.startswith(_FLOATS)


def has_floats(op: LiteOp) -> bool:
    """Tell whether an op reads or makes floats; conversions from and to them do."""
    return any(is_float(t.dtype) for t in (*op.reads, *op.outputs))


def precision_of(op: LiteOp) -> str:
    """Return the type that an op computes in, and that of its weights if it is another.

    The type is that of what it computes from and into; a file's names for it are
    "int8", "float32", "int16 with int8 weights", or "float32 with int8 weights
    (hybrid)" where TFLite quantizes the activations while it runs.
    """
    read, made = op.reads, op.outputs
    if op.kind in _CONVERSIONS and read and made:
        return f"{read[0].dtype} to {made[0].dtype}"
    computing = _main_type([*(t for t in read if not t.stored_bytes), *made])
    weights = _weights_type(read)
    if weights is None or computing is None or weights == computing:
        return computing or "none"
    is_hybrid = is_float(computing) and not is_float(weights)
    return f"{computing} with {weights} weights{' (hybrid)' if is_hybrid else ''}"


def computes_in_float(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of floats."""
    return is_float(precision) and " to " not in precision


def is_quantized(precision: str) -> bool:
    """Tell whether a type that `precision_of` returned is one of quantized numbers."""
    return precision.startswith(_QUANTIZED) and " to " not in precision


def _main_type(tensors: Sequence[LiteTensor]) -> str | None:
    """Return the type that counts of several: floats, then what is quantized."""
    types = [t.dtype for t in tensors]
    floats = [dtype for dtype in types if is_float(dtype)]
    quantized = [t.dtype for t in tensors if t.quantization is not None]
    numbers = [dtype for dtype in types if dtype not in _NO_NUMBERS]
    return next(iter([*floats, *quantized, *numbers, *types]), None)


def _weights_type(read: Sequence[LiteTensor]) -> str | None:
    """Return the type of the largest constant that an op reads, biases apart."""
    weights = [t for t in read if t.stored_bytes and t.dtype not in _WIDE]
    weights = [t for t in weights if is_float(t.dtype) or t.quantization is not None]
    largest = max(weights, key=lambda t: t.stored_bytes, default=None)
    return None if largest is None else largest.dtype


def stored_bytes(file: Contents) -> dict[str, int]:
    """Return what the constants of a file take by their type, the largest first."""
    totals: dict[str, int] = {}
    # In the order of the file, the first tensor of a buffer tells its type.
    of_buffers = {id(t.buffer): t for t in reversed([*file.tensors])}
    for tensor in of_buffers.values():
        if tensor.stored_bytes:
            dtype, size = tensor.dtype, tensor.stored_bytes
            totals[dtype] = totals.get(dtype, 0) + size
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
