"""How a file stores weights: in the steps that are simulated, and few bits packed.

TFLite's converter stores matrices in steps of its own, from their largest values. Where
rounding leaves the last level of a range empty these are others than the
simulated ones, and values would be rounded twice.

It is given all weights in 8 bits, fewer ones on the levels that they have: 4 bits hold
-7 to 7. What has no others is stored in 4 bits here, where TFLite's kernels for that
are as fast as others. Those of depthwise and of grouped convolutions are not: XNNPACK
leaves the op to a kernel that unpacks the weights each time (MobileNetV2 at 96 px, x86:
2.1 ms with them, 1.0 ms without; int8 0.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil import tflite
from geutil.tflite import LiteOp, LiteTensor, Quantization

Array = np.ndarray[Any, Any]

_INT4_VERSIONS = {"CONV_2D": 7, "FULLY_CONNECTED": 10}
"""Kinds of ops that take weights of 4 bits, and the versions of their kernels."""
MOST_IN_4_BITS = 7
_WEIGHTS, _BIAS = 1, 2
_IMAGE_RANK = 4


@dataclass(frozen=True, eq=False)
class SteppedMatrix:
    """A matrix as it is simulated.

    Attributes:
        values: its values, each a whole number of steps: [inputs, outputs].
        steps: the sizes of the steps: [outputs].
    """

    values: Array
    steps: Array


def stored_as_simulated(blob: bytes, matrices: Sequence[SteppedMatrix]) -> bytes:
    """Return a file whose weights are stored in simulated steps, and in 4 bits if few.

    Args:
        blob: the file.
        matrices: the matrices whose columns have steps each.

    Cost: linear in the file; for each matrix product, in the matrices of its shape.
    """
    file = tflite.open(blob)
    before = [*file.tensors]
    products = [op for op in file.ops if op.kind == "FULLY_CONNECTED"]
    # Of each, for its effect.
    changed = [_with_steps(op, matrices) for op in products]
    changed += [_packed(tensor) for tensor in before]
    if not any(changed):
        return blob
    file.strip()
    return file.to_bytes()


def _with_steps(op: LiteOp, matrices: Sequence[SteppedMatrix]) -> bool:
    """Store the weights of a product in the steps of the matrix that they come from."""
    tensor = op.inputs[_WEIGHTS]
    if tensor is None or tensor.dtype != "int8" or tensor.quantization is None:
        return False
    stored, steps = tensor.value, tensor.quantization.sizes
    if stored is None or steps.size == 1:
        return False
    values = stored * steps[:, None]
    for matrix in matrices:
        if matrix.values.T.shape == values.shape and np.all(
            np.abs(matrix.values.T - values) <= steps[:, None]
        ):
            break
    else:
        return False
    # The steps of what is zero throughout are chosen so that biases can be stored.
    new_steps = np.where(values.any(1), matrix.steps, steps).astype(np.float32)
    if np.allclose(new_steps, steps, rtol=1e-6, atol=0.0):
        return False
    tensor.value = np.round(matrix.values.T / new_steps[:, None]).astype(np.int8)
    tensor.quantization = Quantization.of(new_steps)
    _rescale_bias(op, steps / new_steps)
    return True


def _rescale_bias(op: LiteOp, factors: Array) -> None:
    """Let a product have a bias that is stored in other steps."""
    old = op.inputs[_BIAS] if len(op.inputs) > _BIAS else None
    if old is None or old.value is None or old.quantization is None:
        return
    # Another product may read the old one.
    new = old.like("int32")
    new.value = np.round(old.value.astype(np.float64) * factors)
    new.quantization = Quantization.of(old.quantization.sizes / factors)
    op.set_input(_BIAS, new)


def _packed(tensor: LiteTensor) -> bool:
    """Store a tensor in 4 bits if that is possible, and all that read it can."""
    value = tensor.value if tensor.dtype == "int8" else None
    if value is None or value.ndim < 2 or np.abs(value).max(initial=0) > MOST_IN_4_BITS:
        return False
    readers, steps = tensor.consumers, tensor.quantization
    as_weights = all(op.inputs[_WEIGHTS] is tensor for op in readers)
    kinds = {op.kind for op in readers}
    if not readers or not as_weights or not kinds <= set(_INT4_VERSIONS):
        return False
    if (steps and any(steps.zero_points)) or _is_by_groups(value, readers):
        return False
    tensor.store(value, "int4")
    for op in readers:
        op.version = max(op.version, _INT4_VERSIONS[op.kind])
    return True


def _is_by_groups(weights: Array, readers: Sequence[LiteOp]) -> bool:
    """Tell whether weights are those of a convolution by groups of channels."""
    return weights.ndim == _IMAGE_RANK and any(
        op.reads[0].sizes[-1] != weights.shape[-1] for op in readers
    )
