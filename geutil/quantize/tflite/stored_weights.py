"""Weights of a file, stored in the integers that FakeQuant ops simulate.

TFLite's converter, if it is asked for no optimization, writes each FakeQuant op as a
QUANTIZE and a DEQUANTIZE op between float kernels. Of weights the first reads a
constant. Here it is run once, and its result is stored; what only moves values behind
the second is run, too: a Transpose of a matrix moves the axis of its channels along,
which the converter does not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from geutil.quantize.schemes import FEWEST_ROUNDED
from geutil.tflite import LiteGraph, LiteOp, LiteTensor, Quantization
from geutil.tflite.op_names import called, sources_of
from geutil.tflite.parts import Array
from geutil.tflite.versions import version_of


@dataclass(frozen=True)
class LeftInFloat:
    """An op that computes in float."""

    kind: str
    result: str
    reason: str
    is_chosen: bool = False

    def __str__(self) -> str:
        return f"{self.kind} '{self.result}' computes in float: {self.reason}"


_MIDDLES = {"uint4": 8, "uint8": 128, "uint16": 32768, "int4": 0, "int8": 0, "int16": 0}
"""What an unsigned type adds to integers that are stored with a sign."""
_MOVING = ("RESHAPE", "TRANSPOSE")
_HYBRID_VERSIONS = {"CONV_2D": 5, "FULLY_CONNECTED": 9}
"""Kinds of ops that round their data while they run, for weights of 8 bits."""
_SLOW_HYBRIDS = ("DEPTHWISE_CONV_2D",)
"""Kinds whose kernels for that take longer than those in float."""
_INT4_VERSIONS = {"CONV_2D": 7, "DEQUANTIZE": 6, "FULLY_CONNECTED": 10}
"""Kinds of ops that read weights of 4 bits, and the versions of their kernels."""
_MOST_IN_4_BITS = 7
"""4 bits hold -7 to 7 without the one that has no counterpart."""
# The rank of filters of two-dimensional convolutions.
_IMAGE_RANK = 4
# The input of kernels that holds the weights.
_WEIGHTS = 1
_WITH_WEIGHTS = (*_HYBRID_VERSIONS, *_SLOW_HYBRIDS, "TRANSPOSE_CONV")


def store_weights(graph: LiteGraph) -> None:
    """Store quantized constants in front of DEQUANTIZE ops."""
    kept = []
    for op in graph.ops:
        value = op.reads[0].value if op.kind == "QUANTIZE" else None
        if value is None:
            kept.append(op)
        else:
            _store(op.outputs[0], value)
    graph.set_ops(kept)
    _move_constants(graph)


def _store(tensor: LiteTensor, value: Array) -> None:
    """Let a tensor hold a value in its steps, with a sign."""
    steps, middle = tensor.in_steps(), _MIDDLES[tensor.dtype]
    scales, zeros = steps.along(value.ndim)
    # As FakeQuant ops round: halves up.
    levels = np.floor(value / scales + np.float32(0.5)) + (zeros - middle)
    dtype = "int16" if middle == 32768 else "int8"
    limits = np.iinfo(dtype)
    # Of a single number NumPy makes a scalar, which is no array.
    tensor.store(np.asarray(np.clip(levels, limits.min, limits.max)), dtype)
    zero = steps.zero_points[0] - middle
    tensor.quantization = Quantization.of(steps.sizes, steps.axis, zero)


def _move_constants(graph: LiteGraph) -> None:
    """Run ops that move the values of constants behind DEQUANTIZE ops."""
    source_of: dict[LiteTensor, LiteTensor] = {}
    ops = []
    for op in graph.ops:
        if op.kind == "DEQUANTIZE" and op.reads[0].stored_bytes:
            source_of[op.outputs[0]] = op.reads[0]
            op.version = version_of(op)
        elif op.kind in _MOVING and op.reads[0] in source_of:
            moved = _moved(op, source_of[op.reads[0]])
            if moved is not None:
                source_of[op.outputs[0]] = moved
                op = LiteOp("DEQUANTIZE", [moved], op.outputs)
                op.version = version_of(op)
        ops.append(op)
    graph.set_ops(ops)


def _moved(op: LiteOp, tensor: LiteTensor) -> LiteTensor | None:
    """Return a tensor with the values of one in the places that an op moves them to."""
    value, steps = tensor.value, tensor.quantization
    if value is None or steps is None:
        return None
    if op.kind == "TRANSPOSE":
        order = op.reads[1].value
        if order is None:
            return None
        places = order.tolist()
        moved, axis = value.transpose(places), places.index(steps.axis)
    else:
        shape = op.outputs[0].sizes
        moved, axis = value.reshape(shape), len(shape) - 1
        keeps = steps.axis == value.ndim - 1 and shape[-1:] == value.shape[-1:]
        if len(steps.scales) > 1 and not keeps:
            return None
    new = tensor.like()
    new.value = moved
    new.quantization = Quantization.of(steps.sizes, axis, steps.zero_points[0])
    return new


def layers_lost(
    graph: LiteGraph, is_quantized: Mapping[str, bool]
) -> Iterator[LeftInFloat]:
    """Yield the layers whose weights are float constants though they are quantized."""
    for op in graph.ops:
        weights = op.inputs[_WEIGHTS] if op.kind in _WITH_WEIGHTS else None
        if weights is None or weights.dtype != "float32" or not weights.stored_bytes:
            continue
        if any(called(source, is_quantized) for source in sources_of(op.result)):
            why = "the converter stores its weights in float"
            yield LeftInFloat(op.kind, op.result, why)


def pack_weights(graph: LiteGraph) -> None:
    """Store constants in 4 bits where they fit, and all that read them can.

    Kernels of depthwise and of grouped convolutions are slow with such: XNNPACK leaves
    the op to a kernel that unpacks the weights each time (MobileNetV2 at 96 px, x86:
    2.1 ms with them, 1.0 ms without; int8 0.4).
    """
    for tensor in graph.tensors:
        value = tensor.value if tensor.dtype == "int8" else None
        # In 8 bits -128 is its own absolute value.
        if value is None or np.abs(value.astype(int)).max(initial=0) > _MOST_IN_4_BITS:
            continue
        readers = tensor.consumers
        if readers and all(_takes_4_bits(op, tensor, value) for op in readers):
            tensor.store(value, "int4")
            for op in readers:
                op.version = max(op.version, _INT4_VERSIONS[op.kind])


def _takes_4_bits(op: LiteOp, tensor: LiteTensor, value: Array) -> bool:
    """Tell whether an op reads weights of 4 bits, and loses no time by that."""
    if op.kind == "DEQUANTIZE":
        return True
    if op.kind not in _INT4_VERSIONS or op.inputs[_WEIGHTS] is not tensor:
        return False
    steps = tensor.quantization
    if value.ndim < 2 or (steps is not None and any(steps.zero_points)):
        return False
    is_by_groups = op.reads[0].sizes[-1] != value.shape[-1]
    return not (value.ndim == _IMAGE_RANK and is_by_groups)


def read_weights_stored(graph: LiteGraph) -> list[LeftInFloat]:
    """Let layers read stored weights themselves, where TFLite can round their data."""
    left = []
    for op in graph.ops:
        stored = {
            slot: tensor.producer.reads[0]
            for slot, tensor in enumerate(op.inputs)
            if tensor is not None
            and tensor.producer is not None
            and tensor.producer.kind == "DEQUANTIZE"
            and tensor.producer.reads[0].stored_bytes
        }
        if not stored or op.kind == "DEQUANTIZE":
            continue
        reason = _reason_in_float(op.kind, stored)
        if reason is not None:
            left.append(LeftInFloat(op.kind, op.result, *reason))
            continue
        op.set_input(_WEIGHTS, stored[_WEIGHTS])
        if op.kind == "FULLY_CONNECTED":
            op.options["asymmetric_quantize_inputs"] = True
        op.version = max(op.version, _HYBRID_VERSIONS[op.kind])
    return left


def _reason_in_float(
    kind: str, stored: Mapping[int, LiteTensor]
) -> tuple[str, bool] | None:
    """Return why a layer's data is not rounded as it runs, and if that is a choice."""
    is_layer = [*stored] == [_WEIGHTS]
    if is_layer and kind in _SLOW_HYBRIDS:
        return "TFLite's kernel that rounds data as it runs takes longer", True
    if not is_layer or kind not in _HYBRID_VERSIONS:
        return f"TFLite has no kernel for {kind} that rounds data as it runs", False
    count = int(np.prod(stored[_WEIGHTS].sizes))
    if count < FEWEST_ROUNDED:
        few = f"with {count} weights"
        return f"{few}, rounding data as it runs takes longer than it saves", True
    return None
