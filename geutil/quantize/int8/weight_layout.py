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

from geutil.tflite import old_edits as tflite_edits
from geutil.tflite.run import packed, unpacked

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
    model = unpacked(blob)
    before = [len(graph.tensors) for graph in model.subgraphs]
    changed = False
    for graph in model.subgraphs:
        for op in graph.operators:
            if tflite_edits.kind_of(model, op) == "FULLY_CONNECTED":
                changed |= _with_steps(model, graph, op, matrices)
    for graph, count in zip(model.subgraphs, before, strict=True):
        readers = _readers(graph)
        for index in range(count):
            changed |= _packed(model, graph, index, readers[index])
    if not changed:
        return blob
    tflite_edits.drop_unread(model)
    return packed(model)


def _with_steps(
    model: Any, graph: Any, op: Any, matrices: Sequence[SteppedMatrix]
) -> bool:
    """Store the weights of a product in the steps of the matrix that they come from."""
    tensor = graph.tensors[op.inputs[_WEIGHTS]]
    stored, steps = tflite_edits.constant(model, tensor), tflite_edits.steps_of(tensor)
    if stored is None or stored.dtype != np.int8 or steps is None or steps.size == 1:
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
    levels = np.round(matrix.values.T / new_steps[:, None]).astype(np.int8)
    tflite_edits.set_constant(model, tensor, levels, "INT8")
    tflite_edits.set_steps(tensor, new_steps)
    if len(op.inputs) > _BIAS and op.inputs[_BIAS] >= 0:
        _rescale_bias(model, graph, op, steps / new_steps)
    return True


def _rescale_bias(model: Any, graph: Any, op: Any, factors: Array) -> None:
    """Let a product have a bias that is stored in other steps."""
    old = graph.tensors[op.inputs[_BIAS]]
    value, steps = tflite_edits.constant(model, old), tflite_edits.steps_of(old)
    if value is None or steps is None:
        return
    # Another product may read the old one.
    index = tflite_edits.new_tensor(graph, old)
    levels = np.round(value.astype(np.float64) * factors)
    tflite_edits.set_constant(model, graph.tensors[index], levels, "INT32")
    tflite_edits.set_steps(graph.tensors[index], steps / factors)
    op.inputs[_BIAS] = index


def _readers(graph: Any) -> list[list[Any]]:
    """Return the ops that read each tensor."""
    readers: list[list[Any]] = [[] for _ in graph.tensors]
    for op in graph.operators:
        for index in dict.fromkeys(int(i) for i in op.inputs if i >= 0):
            readers[index].append(op)
    return readers


def _packed(model: Any, graph: Any, index: int, readers: Sequence[Any]) -> bool:
    """Store a tensor in 4 bits if that is possible, and all that read it can."""
    tensor = graph.tensors[index]
    value = (
        tflite_edits.constant(model, tensor)
        if tflite_edits.type_of(tensor) == "INT8"
        else None
    )
    if value is None or value.ndim < 2 or np.abs(value).max(initial=0) > MOST_IN_4_BITS:
        return False
    kinds = {tflite_edits.kind_of(model, op) for op in readers}
    as_weights = all(op.inputs[_WEIGHTS] == index for op in readers)
    if not readers or not as_weights or not kinds <= set(_INT4_VERSIONS):
        return False
    if tflite_edits.zeros_of(tensor).any() or _is_by_groups(graph, tensor, readers):
        return False
    tflite_edits.set_constant(model, tensor, value, "INT4")
    for kind in kinds:
        tflite_edits.code_index(model, kind, _INT4_VERSIONS[kind])
    return True


def _is_by_groups(graph: Any, weights: Any, readers: Sequence[Any]) -> bool:
    """Tell whether weights are those of a convolution by groups of channels."""
    return len(weights.shape) == _IMAGE_RANK and any(
        graph.tensors[op.inputs[0]].shape[-1] != weights.shape[-1] for op in readers
    )
