"""Steps of integers: numbers stored in them, and the kernels that tie them together.

The tables are those of TFLite's specification of quantized kernels
(https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/quantization_spec).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from geutil.tflite.kinds import KINDS, StepRule
from geutil.tflite.parts import Array, LiteOp, LiteTensor, Quantization
from geutil.tflite.schema import DTYPES, PACKED_BITS

STEPPED = ("int2", "int4", "int8", "int16", "uint4", "uint8")
"""Types that stand for other numbers in the tensors that kernels compute."""
BIASED: Mapping[str, tuple[int, int, int]] = {
    "CONV_2D": (0, 1, 2),
    "CONV_3D": (0, 1, 2),
    "DEPTHWISE_CONV_2D": (0, 1, 2),
    "FULLY_CONNECTED": (0, 1, 2),
    "TRANSPOSE_CONV": (2, 1, 3),
}
"""The places of input, weights and bias, whose scale is the product of theirs."""
_SHARED = (StepRule.JOINS, StepRule.KEEPS, StepRule.SELECTS)
ONE_SCALE = frozenset(
    {
        *(name for name, kind in KINDS.items() if kind.rule in _SHARED),
        *("ASSIGN_VARIABLE", "DYNAMIC_UPDATE_SLICE", "NEG", "READ_VARIABLE"),
        *("REVERSE_SEQUENCE", "SCATTER_ND"),
    }
)
"""Kinds whose kernels move or compare integers, and rescale none."""
FIXED_SCALE: Mapping[tuple[str, str], tuple[float, int]] = {
    ("L2_NORMALIZATION", "int8"): (1 / 128, 0),
    ("LOGISTIC", "int16"): (1 / 32768, 0),
    ("LOGISTIC", "int8"): (1 / 256, -128),
    ("LOG_SOFTMAX", "int8"): (16 / 256, 127),
    ("SOFTMAX", "int16"): (1 / 32768, 0),
    ("SOFTMAX", "int8"): (1 / 256, -128),
    ("TANH", "int16"): (1 / 32768, 0),
    ("TANH", "int8"): (1 / 128, 0),
}
"""The scale and zero point of results that a kernel has built in."""


def limits(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest integer of a type."""
    bits = PACKED_BITS.get(dtype)
    if bits is None:
        info = np.iinfo(DTYPES[dtype])
        return int(info.min), int(info.max)
    low = 0 if dtype[0] == "u" else -(2 ** (bits - 1))
    return low, low + 2**bits - 1


_INTEGERS = (*STEPPED, "int32", "uint16")


def faults_of_steps(
    steps: Quantization | None, dtype: str, sizes: Sequence[int]
) -> Iterator[str]:
    """Yield why a tensor of a type and shape cannot have steps."""
    if steps is None or steps.block or dtype not in _INTEGERS:
        return
    scales = np.asarray(steps.scales)
    if not scales.size or not (np.isfinite(scales).all() and (scales > 0).all()):
        yield f"has a scale that is not positive; scales are positive numbers: {scales}"
    if len(steps.zero_points) not in (1, scales.size):
        yield f"has {scales.size} scales and {len(steps.zero_points)} zero points"
    if len(scales) > 1:
        count = sizes[steps.axis] if 0 <= steps.axis < len(sizes) else 0
        if count != len(scales):
            yield f"has {len(scales)} scales for {count} indices"
    # Kernels of 16 bits have no place for a zero point.
    low, high = (0, 0) if dtype == "int16" else limits(dtype)
    if any(not low <= zero <= high for zero in steps.zero_points):
        yield (
            f"has a zero point outside of {dtype}, which is from {low} to {high}, not "
            f"{steps.zero_points[0]}"
        )


def numbers_of(integers: Array, steps: Quantization) -> Array:
    """Return the numbers that integers stand for, in float32."""
    scales, zeros = _along(integers, steps)
    exact = (integers.astype(np.int64) - zeros) * scales.astype(np.float64)
    made: Array = exact.astype(np.float32)
    return made


def _along(integers: Array, steps: Quantization) -> tuple[Array, Array]:
    """Return scales and zero points that broadcast over values, those of blocks too."""
    if not steps.block:
        return steps.along(integers.ndim)
    found = []
    for tensor in (steps.block_scales, steps.block_zeros):
        value = None if tensor is None else tensor.value
        each = np.zeros(1) if value is None else value.astype(np.float64)
        if each.size > 1:
            each = each.reshape(*integers.shape[:-1], -1).repeat(steps.block, -1)
        found.append(each)
    return found[0], found[1]


def integers_of(numbers: Array, steps: Quantization, dtype: str) -> tuple[Array, Array]:
    """Return the integers that stand for numbers, and which of these were clipped.

    Halves are rounded away from zero, as TFLite does.
    """
    scales, zeros = _along(numbers, steps)
    exact = numbers.astype(np.float64) / scales
    wanted = np.trunc(exact + np.copysign(0.5, exact)) + zeros
    low, high = limits(dtype)
    stored = np.clip(wanted, low, high)
    return stored.astype(DTYPES.get(dtype, np.int8)), stored != wanted


Three = tuple[LiteTensor | None, LiteTensor | None, LiteTensor | None]


def layer_inputs(op: LiteOp) -> Three:
    """Return the input, weights and bias of an op; None for those that it lacks."""
    places = None if op.is_custom else BIASED.get(op.kind)
    if places is None:
        return None, None, None
    read = dict(enumerate(op.inputs))
    return read.get(places[0]), read.get(places[1]), read.get(places[2])


def bias_steps(
    op: LiteOp, new: Mapping[LiteTensor, Quantization] = MappingProxyType({})
) -> Quantization | None:
    """Return the steps of an op's bias where some tensors have new ones, or None."""
    x, weights, bias = layer_inputs(op)
    if x is None or weights is None or bias is None or bias.dtype not in _WIDE:
        return None
    of_x, of_weights = (new.get(t, t.quantization) for t in (x, weights))
    if of_x is None or of_weights is None or of_weights.block:
        return None
    scale = np.float32(of_x.scales[0])
    scales = tuple(float(scale * np.float32(s)) for s in of_weights.scales)
    return replace(of_weights, scales=scales, zero_points=(0,) * len(scales), axis=0)


_WIDE = ("int32", "int64")


def one_step(tensor: LiteTensor) -> tuple[float, int] | None:
    """Return the scale and zero point of a tensor; None if it has not just one."""
    steps = tensor.quantization
    if steps is None or len(steps.scales) != 1:
        return None
    return steps.scales[0], steps.zero_points[0]


def have_equal_steps(one: LiteTensor, other: LiteTensor) -> bool:
    """Tell whether two tensors have the same type, scale and zero point."""
    first, second = one_step(one), one_step(other)
    return (
        first is not None
        and second is not None
        and one.dtype == other.dtype
        and first[1] == second[1]
        # Kernels that rescale nothing allow this: kernels/pooling.cc.
        and abs(first[0] - second[0]) <= 1e-6
    )
