"""Lowering of files of float kernels to kernels with activations of 16 bits.

Between float kernels stand QUANTIZE and DEQUANTIZE ops, as `stored_weights` leaves
them. A kernel computes in integers if all that it reads is dequantized or constant,
and what it makes is quantized again; then it reads and makes the integers themselves,
and the two ops go. Others stay in float between the two.

Values are stored in symmetric steps: x = step * q with q from -32767 to 32767. A layer
adds its bias in 64 bits, in steps of the data's step times the weights'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from geutil.quantize.tflite.int16_kernels import (
    INEXACT,
    INT16_KERNELS,
    Int16Kernel,
    Rule,
)
from geutil.quantize.tflite.stored_weights import LeftInFloat
from geutil.tflite import old_edits as tflite_edits

Array = np.ndarray[Any, Any]

_MOST = 32767
_FIXED_STEP = 2.0**-15
_QUANTIZE_VERSION, _DEQUANTIZE_VERSION = 3, 6
_MOVES = frozenset(("EXPAND_DIMS", "RESHAPE", "SQUEEZE", "TRANSPOSE"))
_SAME = 1e-5
"""Steps that differ by less than this share store the same."""


def lower_to_int16(model: Any, graph: Any) -> list[LeftInFloat]:
    """Let the ops of a subgraph compute with activations of 16 bits where they can.

    Args:
        model: the file, which is changed.
        graph: one of its subgraphs, whose weights are stored.

    Returns:
        The ops that go on computing in float.

    Cost: linear in ops, tensors and constants.
    """
    return _Lowering(model, graph).lower()


class _Lowering:
    def __init__(self, model: Any, graph: Any) -> None:
        self._model = model
        self._graph = graph
        # By float tensors, the integers that they are dequantized from.
        self._stored: dict[int, int] = {}
        self._operators: list[Any] = []
        self._left: list[LeftInFloat] = []
        # By float tensors, the QUANTIZE ops that read them.
        self._quantizers: dict[int, list[Any]] = {}
        self._done: set[int] = set()

    def lower(self) -> list[LeftInFloat]:
        """Go through the ops in their order, which is topological."""
        for op in self._graph.operators:
            if self._kind(op) == "QUANTIZE":
                self._quantizers.setdefault(int(op.inputs[0]), []).append(op)
        for tensor in self._graph.tensors:
            self._with_sign(tensor)
        self._quantize_before_moves()
        self._take_inputs()
        for op in self._graph.operators:
            self._take(op)
        self._graph.operators = self._operators
        self._give_outputs()
        return self._left

    def _kind(self, op: Any) -> str:
        return tflite_edits.kind_of(self._model, op)

    def _tensor(self, index: int) -> Any:
        return self._graph.tensors[index]

    def _constant(self, index: int) -> Array | None:
        return tflite_edits.constant(self._model, self._tensor(index))

    def _with_sign(self, tensor: Any) -> None:
        """Let an activation be stored in integers with a sign, without a zero point."""
        kind, steps = tflite_edits.type_of(tensor), tflite_edits.steps_of(tensor)
        if kind not in ("UINT8", "UINT16") or steps is None:
            return
        step, zero = float(steps[0]), int(tflite_edits.zeros_of(tensor)[0])
        if kind == "UINT8":
            tflite_edits.set_type(tensor, "INT8")
            tflite_edits.set_steps(tensor, steps, zero=zero - 128)
            return
        reach = max(zero, 2**16 - 1 - zero) * step
        if abs(zero - 2**15) <= 1:
            reach = _MOST * step
        tflite_edits.set_type(tensor, "INT16")
        tflite_edits.set_steps(tensor, reach / _MOST)

    def _step(self, index: int) -> float:
        return float(tflite_edits.known_steps(self._tensor(index))[0])

    def _quantize_before_moves(self) -> None:
        """Quantize what is moved rather than what was: its values are the same.

        The converter lets a Reshape of an input come first, and a product in rows is
        quantized behind the Reshape that brings them back.
        """
        readers: dict[int, int] = {}
        stored: set[int] = set()
        for op in self._graph.operators:
            for index in map(int, op.inputs):
                readers[index] = readers.get(index, 0) + 1
            if self._kind(op) == "DEQUANTIZE":
                stored.add(int(op.outputs[0]))
        operators = []
        # From the end, so that of moves in a row each finds what was put before it.
        for op in reversed(self._graph.operators):
            operators.append(op)
            if self._kind(op) not in _MOVES:
                continue
            source, target = int(op.inputs[0]), self._target(int(op.outputs[0]))
            if target is None or source in stored or not self._is_float(source):
                continue
            if readers[source] == 1 and self._constant(source) is None:
                operators += reversed(self._quantized(op, source, self._step(target)))
        self._graph.operators = operators[::-1]

    def _quantized(self, op: Any, source: int, step: float) -> list[Any]:
        """Let an op read a tensor quantized; return the ops that make it so."""
        stored, floats = (
            tflite_edits.new_tensor(self._graph, self._tensor(source)) for _ in range(2)
        )
        tflite_edits.set_type(self._tensor(stored), "INT16")
        tflite_edits.set_steps(self._tensor(stored), step)
        quantize = tflite_edits.new_op(
            self._model, "QUANTIZE", [source], [stored], _QUANTIZE_VERSION
        )
        dequantize = tflite_edits.new_op(
            self._model, "DEQUANTIZE", [stored], [floats], _DEQUANTIZE_VERSION
        )
        op.inputs[0] = floats
        self._quantizers.setdefault(source, []).append(quantize)
        return [quantize, dequantize]

    def _take_inputs(self) -> None:
        """Let the file take integers where its inputs are quantized."""
        for index in list(map(int, self._graph.inputs)):
            target = self._target(index)
            if target is None:
                continue
            self._replace_end(index, target)
            self._settle(index, target)

    def _give_outputs(self) -> None:
        """Let the file give integers where its outputs are quantized."""
        for index in list(map(int, self._graph.outputs)):
            stored = self._stored.get(index)
            if stored is not None and self._constant(stored) is None:
                self._replace_end(index, stored)

    def _replace_end(self, index: int, stored: int) -> None:
        """Let integers be an input or an output in the place of floats."""
        self._tensor(stored).name = self._tensor(index).name
        tflite_edits.set_end(self._model, self._graph, index, stored)

    def _target(self, index: int) -> int | None:
        """Return the integers of 16 bits that a tensor is quantized to, if any."""
        for op in self._quantizers.get(index, ()):
            if tflite_edits.type_of(self._tensor(op.outputs[0])) == "INT16":
                return int(op.outputs[0])
        return None

    def _settle(self, index: int, stored: int) -> None:
        """Take note that integers are there, from which floats and others are made."""
        self._stored[index] = stored
        self._add("DEQUANTIZE", stored, index, _DEQUANTIZE_VERSION)
        for op in self._quantizers.get(index, ()):
            self._done.add(id(op))
            if int(op.outputs[0]) != stored:
                self._add("QUANTIZE", stored, int(op.outputs[0]), _QUANTIZE_VERSION)

    def _add(self, kind: str, source: int, result: int, version: int) -> None:
        op = tflite_edits.new_op(self._model, kind, [source], [result], version)
        self._operators.append(op)

    def _take(self, op: Any) -> None:
        """Let an op compute in integers, or keep it as it is."""
        kind = self._kind(op)
        if id(op) in self._done:
            return
        if kind == "DEQUANTIZE":
            self._stored[int(op.outputs[0])] = int(op.inputs[0])
        elif kind != "QUANTIZE":
            reason = self._lowered(op, kind)
            if not reason:
                return
            if any(map(self._is_float, map(int, op.outputs))) and not all(
                self._constant(int(i)) is not None for i in op.inputs if i >= 0
            ):
                name = self._tensor(int(op.outputs[0])).name.decode()
                self._left.append(LeftInFloat(kind, name, reason))
        self._operators.append(op)

    def _is_float(self, index: int) -> bool:
        return index >= 0 and tflite_edits.type_of(self._tensor(index)) == "FLOAT32"

    def _lowered(self, op: Any, kind: str) -> str:
        """Let an op compute in integers; return why it cannot, or nothing."""
        kernel = INT16_KERNELS.get(kind)
        if kernel is None:
            what = "an inexact" if kind in INEXACT else "no"
            return f"TFLite has {what} int16 kernel for {kind}"
        slots = [
            slot
            for slot, index in enumerate(map(int, op.inputs))
            if self._is_float(index)
            and slot not in (kernel.weights, kernel.bias)
            and (kernel.data is None or slot in kernel.data)
        ]
        for slot in slots:
            reason = self._obstacle(int(op.inputs[slot]))
            if reason:
                return reason
        data = [s for s in slots if self._constant(int(op.inputs[s])) is None]
        if not data:
            return "it reads constants alone"
        results = [int(i) for i in op.outputs if self._is_float(int(i))]
        data_steps = [self._step(self._stored[int(op.inputs[slot])]) for slot in data]
        step = data_steps[0]
        step_of: dict[int, float] = {}
        for index in results:
            new_step = self._step_of_result(kernel, index, data_steps)
            if new_step is None:
                return "what it makes is not quantized"
            step_of[index] = new_step
        if kernel.rule is Rule.LAYER:
            reason = self._with_weights(op, kernel, step)
            if reason:
                return reason
        self._compute(op, kernel, slots, step_of)
        return ""

    def _obstacle(self, index: int) -> str:
        if self._constant(index) is not None:
            return ""
        stored = self._stored.get(index)
        if stored is None:
            return "what it reads is not quantized"
        if tflite_edits.type_of(self._tensor(stored)) == "INT16":
            return ""
        steps = tflite_edits.steps_of(self._tensor(stored))
        is_constant = self._constant(stored) is not None
        if is_constant and steps is not None and steps.size == 1:
            return "" if not self._zero(stored) else "what it reads has a zero point"
        return "what it reads has 8 bits"

    def _zero(self, index: int) -> int:
        return int(tflite_edits.zeros_of(self._tensor(index))[0])

    def _step_of_result(
        self, kernel: Int16Kernel, index: int, data_steps: Sequence[float]
    ) -> float | None:
        """Return in which steps a kernel makes a result; None if that is not known."""
        if kernel.rule is Rule.FIXED:
            return _FIXED_STEP
        if kernel.rule is Rule.KEEPS:
            return data_steps[0]
        target = self._target(index)
        if target is None:
            return max(data_steps) if kernel.rule is Rule.JOINS else None
        return self._step(target)

    def _with_weights(self, op: Any, kernel: Int16Kernel, step: float) -> str:
        """Let a layer read stored weights, and a bias in 64 bits."""
        weights = self._stored.get(int(op.inputs[kernel.weights]))
        if weights is None or tflite_edits.type_of(self._tensor(weights)) != "INT8":
            return "its weights are not quantized in 8 bits"
        has_bias = len(op.inputs) > kernel.bias and op.inputs[kernel.bias] >= 0
        bias = self._constant(int(op.inputs[kernel.bias])) if has_bias else None
        if has_bias and bias is None:
            return "its bias is no constant"
        op.inputs[kernel.weights] = weights
        if bias is not None:
            weight_steps = tflite_edits.known_steps(self._tensor(weights))
            steps = weight_steps.astype(np.float64) * step
            old = self._tensor(int(op.inputs[kernel.bias]))
            index = tflite_edits.new_tensor(self._graph, old)
            levels = np.round(bias.astype(np.float64) / steps)
            tflite_edits.set_constant(self._model, self._tensor(index), levels, "INT64")
            tflite_edits.set_steps(self._tensor(index), steps)
            op.inputs[kernel.bias] = index
        return ""

    def _compute(
        self,
        op: Any,
        kernel: Int16Kernel,
        slots: Iterable[int],
        step_of: dict[int, float],
    ) -> None:
        """Let an op read and make integers."""
        for slot in slots:
            index = int(op.inputs[slot])
            joint = next(iter(step_of.values())) if kernel.rule is Rule.JOINS else None
            op.inputs[slot] = self._integers(index, joint)
        op.opcodeIndex = tflite_edits.code_index(
            self._model, self._kind(op), kernel.version
        )
        options = op.builtinOptions
        if hasattr(options, "potScaleInt16"):
            # Else steps have to be powers of two.
            options.potScaleInt16 = False
        self._operators.append(op)
        for place, index in enumerate(map(int, op.outputs)):
            if index in step_of:
                op.outputs[place] = self._result(index, step_of[index])

    def _integers(self, index: int, step: float | None) -> int:
        """Return the integers of a tensor, in steps of a size if that is given."""
        value = self._constant(index)
        if value is not None:
            most = float(np.abs(value).max(initial=0.0)) or 1.0
            return self._constant_integers(index, value, step or most / _MOST)
        stored = self._stored[index]
        value, own_step = self._constant(stored), self._step(stored)
        if value is not None:
            return self._constant_integers(index, value * own_step, step or own_step)
        if step is None or abs(own_step - step) <= _SAME * step:
            return stored
        other = tflite_edits.new_tensor(self._graph, self._tensor(stored))
        tflite_edits.set_steps(self._tensor(other), step)
        self._add("QUANTIZE", stored, other, _QUANTIZE_VERSION)
        return other

    def _constant_integers(self, index: int, value: Array, step: float) -> int:
        new = tflite_edits.new_tensor(self._graph, self._tensor(index))
        levels = np.clip(np.round(value / step), -_MOST, _MOST)
        tflite_edits.set_constant(self._model, self._tensor(new), levels, "INT16")
        tflite_edits.set_steps(self._tensor(new), step)
        return new

    def _result(self, index: int, step: float) -> int:
        """Return the integers that an op makes in the place of floats."""
        stored = self._target(index)
        if stored is None or abs(self._step(stored) - step) > _SAME * step:
            stored = tflite_edits.new_tensor(self._graph, self._tensor(index))
            tflite_edits.set_type(self._tensor(stored), "INT16")
        tflite_edits.set_steps(self._tensor(stored), step)
        self._settle(index, stored)
        return stored
