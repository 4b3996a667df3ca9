"""Lowering of files of float kernels to kernels with activations of 16 bits.

Between float kernels stand QUANTIZE and DEQUANTIZE ops, as `stored_weights` leaves
them. A kernel computes in integers if all that it reads is dequantized or constant,
and what it makes is quantized again; then it reads and makes the integers themselves,
and the two ops go. Others stay in float between the two.

Values are stored in symmetric steps: x = step * q with q from -32767 to 32767. A layer
adds its bias in 64 bits, in steps of the data's step times the weights'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geutil.quantize.tflite.int16_kernels import (
    INEXACT,
    INT16_KERNELS,
    Int16Kernel,
    Rule,
)
from geutil.quantize.tflite.stored_weights import LeftInFloat
from geutil.tflite import LiteFile, LiteGraph, LiteOp, LiteTensor, Quantization
from geutil.tflite.steps import BIASED
from geutil.tflite.upkeep import set_end

Array = np.ndarray[Any, Any]

_MOST = 32767
_FIXED_STEP = 2.0**-15
_VERSIONS = {"DEQUANTIZE": 6, "QUANTIZE": 3}
_MOVES = frozenset(("EXPAND_DIMS", "RESHAPE", "SQUEEZE", "TRANSPOSE"))
_SAME = 1e-5
"""Steps that differ by less than this share store the same."""


def lower_to_int16(file: LiteFile, graph: LiteGraph) -> list[LeftInFloat]:
    """Let the ops of a subgraph compute with activations of 16 bits where they can.

    Args:
        file: the file, which is changed.
        graph: one of its subgraphs, whose weights are stored.

    Returns:
        The ops that go on computing in float.

    Cost: linear in ops, tensors and constants.
    """
    return _Lowering(file, graph).lower()


class _Lowering:
    def __init__(self, file: LiteFile, graph: LiteGraph) -> None:
        self._file, self._graph = file, graph
        # By float tensors, the integers that they are dequantized from.
        self._stored: dict[LiteTensor, LiteTensor] = {}
        self._ops: list[LiteOp] = []
        self._left: list[LeftInFloat] = []
        # By float tensors, the QUANTIZE ops that read them.
        self._quantizers: dict[LiteTensor, list[LiteOp]] = {}
        self._done: set[LiteOp] = set()

    def lower(self) -> list[LeftInFloat]:
        """Go through the ops in their order, which is topological."""
        for op in self._graph.ops:
            if op.kind == "QUANTIZE":
                self._quantizers.setdefault(op.reads[0], []).append(op)
        for tensor in self._graph.tensors:
            _with_sign(tensor)
        self._quantize_before_moves()
        for tensor in self._graph.inputs:
            target = self._target(tensor)
            if target is not None:
                self._replace_end(tensor, target)
                self._settle(tensor, target)
        for op in self._graph.ops:
            self._take(op)
        for op in self._ops:
            # The converter's have those of unsigned integers.
            op.version = max(op.version, _VERSIONS.get(op.kind, 1))
        self._graph.set_ops(self._ops)
        for tensor in self._graph.outputs:
            stored = self._stored.get(tensor)
            if stored is not None and not stored.stored_bytes:
                self._replace_end(tensor, stored)
        return self._left

    def _replace_end(self, tensor: LiteTensor, stored: LiteTensor) -> None:
        """Let integers be an input or an output in the place of floats."""
        stored.name = tensor.name
        set_end(self._file, self._graph, tensor, stored)

    def _quantize_before_moves(self) -> None:
        """Quantize what is moved rather than what was: its values are the same.

        The converter lets a Reshape of an input come first, and a product in rows is
        quantized behind the Reshape that brings them back.
        """
        ops = []
        # From the end, so that of moves in a row each finds what was put before it.
        for op in reversed(self._graph.ops):
            ops.append(op)
            if op.kind not in _MOVES:
                continue
            source, target = op.reads[0], self._target(op.outputs[0])
            maker = source.producer
            if target is None or source.dtype != "float32" or source.stored_bytes:
                continue
            is_stored = maker is not None and maker.kind == "DEQUANTIZE"
            if not is_stored and source.readers == {op: 1}:
                ops += reversed(self._quantized(op, source, _step(target)))
        self._graph.set_ops(ops[::-1])

    def _quantized(self, op: LiteOp, source: LiteTensor, step: float) -> list[LiteOp]:
        """Let an op read a tensor quantized; return the ops that make it so."""
        stored, floats = _integers_like(source, step), source.like()
        op.set_input(0, floats)
        quantize = _conversion(source, stored)
        self._quantizers.setdefault(source, []).append(quantize)
        return [quantize, _conversion(stored, floats)]

    def _target(self, tensor: LiteTensor) -> LiteTensor | None:
        """Return the integers of 16 bits that a tensor is quantized to, if any."""
        made = (op.outputs[0] for op in self._quantizers.get(tensor, ()))
        return next((target for target in made if target.dtype == "int16"), None)

    def _settle(self, tensor: LiteTensor, stored: LiteTensor) -> None:
        """Take note that integers are there, from which floats and others are made."""
        self._stored[tensor] = stored
        self._ops.append(_conversion(stored, tensor))
        for op in self._quantizers.get(tensor, ()):
            self._done.add(op)
            if op.outputs[0] is not stored:
                self._ops.append(_conversion(stored, op.outputs[0]))

    def _take(self, op: LiteOp) -> None:
        """Let an op compute in integers, or keep it as it is."""
        if op in self._done:
            return
        if op.kind == "DEQUANTIZE":
            self._stored[op.outputs[0]] = op.reads[0]
        elif op.kind != "QUANTIZE":
            reason = self._lowered(op)
            if not reason:
                return
            made = any(t.dtype == "float32" for t in op.outputs)
            if made and not all(t.stored_bytes for t in op.reads):
                self._left.append(LeftInFloat(op.kind, op.result, reason))
        self._ops.append(op)

    def _lowered(self, op: LiteOp) -> str:
        """Let an op compute in integers; return why it cannot, or nothing."""
        kernel = INT16_KERNELS.get(op.kind)
        if kernel is None:
            what = "an inexact" if op.kind in INEXACT else "no"
            return f"TFLite has {what} int16 kernel for {op.kind}"
        read = {
            slot: tensor
            for slot, tensor in enumerate(op.inputs)
            if tensor is not None
            and tensor.dtype == "float32"
            and (kernel.data is None or slot in kernel.data)
        }
        for tensor in read.values():
            reason = self._obstacle(tensor)
            if reason:
                return reason
        data = [tensor for tensor in read.values() if not tensor.stored_bytes]
        if not data:
            return "it reads constants alone"
        data_steps = [_step(self._stored[tensor]) for tensor in data]
        step_of: dict[LiteTensor, float] = {}
        for tensor in op.outputs:
            if tensor.dtype == "float32":
                new_step = self._step_of_result(kernel, tensor, data_steps)
                if new_step is None:
                    return "what it makes is not quantized"
                step_of[tensor] = new_step
        if kernel.rule is Rule.LAYER:
            reason = self._with_weights(op, data_steps[0])
            if reason:
                return reason
        self._compute(op, kernel, read, step_of)
        return ""

    def _obstacle(self, tensor: LiteTensor) -> str:
        if tensor.stored_bytes:
            return ""
        stored = self._stored.get(tensor)
        if stored is None:
            return "what it reads is not quantized"
        if stored.dtype == "int16":
            return ""
        steps = stored.quantization
        if stored.stored_bytes and steps is not None and len(steps.scales) == 1:
            return "what it reads has a zero point" if steps.zero_points[0] else ""
        return "what it reads has 8 bits"

    def _step_of_result(
        self, kernel: Int16Kernel, tensor: LiteTensor, data_steps: Sequence[float]
    ) -> float | None:
        """Return in which steps a kernel makes a result; None if that is not known."""
        if kernel.rule is Rule.FIXED:
            return _FIXED_STEP
        if kernel.rule is Rule.KEEPS:
            return data_steps[0]
        target = self._target(tensor)
        if target is None:
            return max(data_steps) if kernel.rule is Rule.JOINS else None
        return _step(target)

    def _with_weights(self, op: LiteOp, step: float) -> str:
        """Let a layer read stored weights, and a bias in 64 bits."""
        _, weights_at, bias_at = BIASED[op.kind]
        weights = self._stored.get(op.reads[weights_at])
        if weights is None or weights.dtype != "int8":
            return "its weights are not quantized in 8 bits"
        old = op.inputs[bias_at] if len(op.inputs) > bias_at else None
        value = None if old is None else old.value
        if old is not None and value is None:
            return "its bias is no constant"
        op.set_input(weights_at, weights)
        if old is not None and value is not None:
            steps = weights.in_steps().sizes.astype(np.float64) * step
            bias = old.like("int64")
            bias.value = np.round(value.astype(np.float64) / steps)
            bias.quantization = Quantization.of(steps)
            op.set_input(bias_at, bias)
        return ""

    def _compute(
        self,
        op: LiteOp,
        kernel: Int16Kernel,
        read: Mapping[int, LiteTensor],
        step_of: Mapping[LiteTensor, float],
    ) -> None:
        """Let an op read and make integers."""
        joint = next(iter(step_of.values())) if kernel.rule is Rule.JOINS else None
        for slot, tensor in read.items():
            op.set_input(slot, self._integers(tensor, joint))
        op.version = max(op.version, kernel.version)
        if "pot_scale_int16" in op.options:
            # Else steps have to be powers of two.
            op.options["pot_scale_int16"] = False
        self._ops.append(op)
        op.outputs = tuple(
            self._result(t, step_of[t]) if t in step_of else t for t in op.outputs
        )

    def _integers(self, tensor: LiteTensor, step: float | None) -> LiteTensor:
        """Return the integers of a tensor, in steps of a size if that is given."""
        value = tensor.value
        if value is not None:
            most = float(np.abs(value).max(initial=0.0)) or 1.0
            return _constant_integers(tensor, value, step or most / _MOST)
        stored = self._stored[tensor]
        value, own_step = stored.value, _step(stored)
        if value is not None:
            return _constant_integers(tensor, value * own_step, step or own_step)
        if step is None or abs(own_step - step) <= _SAME * step:
            return stored
        other = _integers_like(stored, step)
        self._ops.append(_conversion(stored, other))
        return other

    def _result(self, tensor: LiteTensor, step: float) -> LiteTensor:
        """Return the integers that an op makes in the place of floats."""
        stored = self._target(tensor)
        if stored is None or abs(_step(stored) - step) > _SAME * step:
            stored = _integers_like(tensor, step)
        stored.quantization = Quantization.of(step)
        self._settle(tensor, stored)
        return stored


def _with_sign(tensor: LiteTensor) -> None:
    """Let an activation be stored in integers with a sign, without a zero point."""
    steps = tensor.quantization
    if tensor.dtype not in ("uint8", "uint16") or steps is None:
        return
    step, zero = steps.scales[0], steps.zero_points[0]
    if tensor.dtype == "uint8":
        tensor.dtype = "int8"
        tensor.quantization = Quantization.of(steps.sizes, zero=zero - 128)
        return
    reach = max(zero, 2**16 - 1 - zero) * step
    if abs(zero - 2**15) <= 1:
        reach = _MOST * step
    tensor.dtype = "int16"
    tensor.quantization = Quantization.of(reach / _MOST)


def _step(tensor: LiteTensor) -> float:
    return tensor.in_steps().scales[0]


def _integers_like(tensor: LiteTensor, step: float) -> LiteTensor:
    new = tensor.like("int16")
    new.quantization = Quantization.of(step)
    return new


def _constant_integers(tensor: LiteTensor, value: Array, step: float) -> LiteTensor:
    new = _integers_like(tensor, step)
    new.value = np.clip(np.round(value / step), -_MOST, _MOST)
    return new


def _conversion(source: LiteTensor, made: LiteTensor) -> LiteOp:
    """Return an op that stores values in integers, or makes floats of integers."""
    kind = "DEQUANTIZE" if made.dtype == "float32" else "QUANTIZE"
    return LiteOp(kind, [source], [made], version=_VERSIONS[kind])
