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
from typing import Any

import numpy as np

from geutil.quantize.int8.weight_layout import MOST_IN_4_BITS
from geutil.tflite import old_edits as tflite_edits
from geutil.tflite.names import called, sources_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LeftInFloat:
    """An op that computes in float.

    Attributes:
        kind: its type, such as "GELU".
        result: the name of what it makes.
        reason: why.
        is_chosen: whether TFLite has a kernel that computes it otherwise, which takes
            longer.
    """

    kind: str
    result: str
    reason: str
    is_chosen: bool = False

    def __str__(self) -> str:
        return f"{self.kind} '{self.result}' computes in float: {self.reason}"


_MIDDLES = {"UINT4": 8, "UINT8": 128, "UINT16": 32768, "INT4": 0, "INT8": 0, "INT16": 0}
"""What an unsigned type adds to integers that are stored with a sign."""
_MOVING = ("RESHAPE", "TRANSPOSE")
_DEQUANTIZE_VERSION = 6
_HYBRID_VERSIONS = {"CONV_2D": 5, "FULLY_CONNECTED": 9}
"""Kinds of ops that round their data while they run, for weights of 8 bits."""
_SLOW_HYBRIDS = ("DEPTHWISE_CONV_2D",)
"""Kinds whose kernels for that take longer than those in float."""
_WEIGHTS = 1
_WEIGHTS_OF = dict.fromkeys((*_HYBRID_VERSIONS, *_SLOW_HYBRIDS, "TRANSPOSE_CONV"), 1)
_FEWEST_ROUNDED = 1024
"""Layers with fewer weights take longer to round their data than that saves."""


def store_weights(model: Any, graph: Any) -> None:
    """Store what is quantized of constants, in front of DEQUANTIZE ops.

    Args:
        model: a file of float kernels, which is changed.
        graph: one of its subgraphs.

    Cost: linear in ops and constants.
    """
    operators = []
    for op in graph.operators:
        if tflite_edits.kind_of(model, op) == "QUANTIZE":
            value = tflite_edits.constant(model, graph.tensors[op.inputs[0]])
            if value is not None:
                _store(model, graph.tensors[op.outputs[0]], value)
                continue
        operators.append(op)
    graph.operators = operators
    _move_constants(model, graph)


def _store(model: Any, tensor: Any, value: Array) -> None:
    """Let a tensor hold a value in its steps, with a sign."""
    steps, zeros = tflite_edits.known_steps(tensor), tflite_edits.zeros_of(tensor)
    axis = int(tensor.quantization.quantizedDimension)
    middle = _MIDDLES[tflite_edits.type_of(tensor)]
    shape = [1] * value.ndim
    if steps.size > 1:
        shape[axis] = -1
    # As FakeQuant ops round: halves up.
    levels = np.floor(value / steps.reshape(shape) + np.float32(0.5))
    lowest, highest = (-32768, 32767) if middle == 32768 else (-128, 127)
    levels = np.clip(levels + (zeros.reshape(shape) - middle), lowest, highest)
    tflite_edits.set_constant(
        model, tensor, levels, "INT16" if middle == 32768 else "INT8"
    )
    zero = int(zeros[0]) - middle
    tflite_edits.set_steps(tensor, steps, axis, zero)


def _move_constants(model: Any, graph: Any) -> None:
    """Run what moves the values of constants behind DEQUANTIZE ops."""
    source_of: dict[int, int] = {}
    operators = []
    for op in graph.operators:
        kind = tflite_edits.kind_of(model, op)
        result = int(op.outputs[0]) if len(op.outputs) else -1
        source = int(op.inputs[0]) if len(op.inputs) else -1
        if kind == "DEQUANTIZE":
            if tflite_edits.constant(model, graph.tensors[source]) is not None:
                source_of[result] = source
        elif kind in _MOVING and source in source_of:
            moved = _moved(model, graph, op, kind, source_of[source])
            if moved is not None:
                source_of[result] = moved
                op = tflite_edits.new_op(
                    model, "DEQUANTIZE", [moved], [result], _DEQUANTIZE_VERSION
                )
        operators.append(op)
    graph.operators = operators


def _moved(model: Any, graph: Any, op: Any, kind: str, source: int) -> int | None:
    """Return a tensor with the values of one in the places that an op moves them to."""
    tensor = graph.tensors[source]
    value = tflite_edits.constant(model, tensor)
    steps = tflite_edits.steps_of(tensor)
    if value is None or steps is None:
        return None
    axis = int(tensor.quantization.quantizedDimension)
    if kind == "TRANSPOSE":
        order = tflite_edits.constant(model, graph.tensors[op.inputs[1]])
        if order is None:
            return None
        places = [int(place) for place in order]
        new_value, new_axis = value.transpose(places), places.index(axis)
    else:
        shape = [int(size) for size in graph.tensors[op.outputs[0]].shape]
        new_value, new_axis = value.reshape(shape), len(shape) - 1
        keeps = axis == value.ndim - 1 and shape and shape[-1] == value.shape[-1]
        if steps.size > 1 and not keeps:
            return None
    index = tflite_edits.new_tensor(graph, tensor)
    new = graph.tensors[index]
    tflite_edits.set_constant(model, new, new_value, tflite_edits.type_of(tensor))
    zero = int(tflite_edits.zeros_of(tensor)[0])
    tflite_edits.set_steps(new, steps, new_axis if steps.size > 1 else 0, zero)
    return index


def layers_lost(
    model: Any, graph: Any, is_quantized: Mapping[str, bool]
) -> Iterator[LeftInFloat]:
    """Yield the layers whose weights are float constants though they are quantized.

    Args:
        model: the file, whose weights were stored.
        graph: one of its subgraphs.
        is_quantized: for each op of the model by name, whether it is a layer that is
            quantized there.
    """
    for op in graph.operators:
        kind = tflite_edits.kind_of(model, op)
        slot = _WEIGHTS_OF.get(kind)
        if slot is None:
            continue
        weights, made = (graph.tensors[i] for i in (op.inputs[slot], op.outputs[0]))
        is_float = tflite_edits.type_of(weights) == "FLOAT32"
        if not is_float or tflite_edits.constant(model, weights) is None:
            continue
        name = made.name.decode()
        if any(called(source, is_quantized) for source in sources_of(name)):
            yield LeftInFloat(kind, name, "the converter stores its weights in float")


def pack_weights(model: Any, graph: Any) -> None:
    """Store constants in 4 bits that DEQUANTIZE ops read, where they fit."""
    for op in graph.operators:
        if tflite_edits.kind_of(model, op) != "DEQUANTIZE":
            continue
        tensor = graph.tensors[op.inputs[0]]
        if tflite_edits.type_of(tensor) != "INT8":
            continue
        value = tflite_edits.constant(model, tensor)
        if value is not None and np.abs(value).max(initial=0) <= MOST_IN_4_BITS:
            tflite_edits.set_constant(model, tensor, value, "INT4")


def read_weights_stored(model: Any, graph: Any) -> list[LeftInFloat]:
    """Let layers read stored weights themselves, where TFLite can round their data.

    Returns:
        The layers that go on reading them as floats.

    Cost: linear in the ops.
    """
    source_of = {
        int(op.outputs[0]): int(op.inputs[0])
        for op in graph.operators
        if tflite_edits.kind_of(model, op) == "DEQUANTIZE"
    }
    left = []
    for op in graph.operators:
        kind = tflite_edits.kind_of(model, op)
        stored = [int(i) for i in op.inputs if int(i) in source_of]
        constants = [
            i
            for i in stored
            if tflite_edits.constant(model, graph.tensors[source_of[i]]) is not None
        ]
        if not constants or kind == "DEQUANTIZE":
            continue
        weights = tflite_edits.constant(model, graph.tensors[source_of[constants[0]]])
        reason = _reason_in_float(kind, op, constants, weights)
        if reason is not None:
            name = graph.tensors[op.outputs[0]].name.decode()
            left.append(LeftInFloat(kind, name, *reason))
            continue
        op.inputs[_WEIGHTS] = source_of[constants[0]]
        if kind == "FULLY_CONNECTED":
            op.builtinOptions.asymmetricQuantizeInputs = True
        tflite_edits.code_index(model, kind, _HYBRID_VERSIONS[kind])
    return left


def _reason_in_float(
    kind: str, op: Any, constants: list[int], weights: Array | None
) -> tuple[str, bool] | None:
    """Return why a layer's data is not rounded as it runs, and if that is a choice."""
    is_layer = constants == [int(op.inputs[_WEIGHTS])] if len(op.inputs) > 1 else False
    if is_layer and kind in _SLOW_HYBRIDS:
        return "TFLite's kernel that rounds data as it runs takes longer", True
    if not is_layer or kind not in _HYBRID_VERSIONS:
        return f"TFLite has no kernel for {kind} that rounds data as it runs", False
    if weights is not None and weights.size < _FEWEST_ROUNDED:
        few = f"with {weights.size} weights"
        return f"{few}, rounding data as it runs takes longer than it saves", True
    return None
