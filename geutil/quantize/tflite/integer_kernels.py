"""Lowering of files of float kernels to kernels that compute in integers.

Between float kernels stand QUANTIZE and DEQUANTIZE ops, as `stored_weights` leaves
them. A kernel computes in integers if all its data are dequantized or constant, and
its result is quantized again; then it reads and makes the integers themselves, and the
two ops go. Others stay in float between the two.

Values of 8 bits are `scale * (q - zero_point)`, with q from -128 to 127; those of 16
bits have no zero point, and q from -32767 to 32767. A layer adds its bias in 32 or 64
bits, in steps of the data's step times the weights'.

TFLite's own converter quantizes, too, and goes wrong in some fifteen places (biases of
equal numbers, zeros and ones that are dropped, matrices that are turned, weights that
two layers share). So it only writes the float file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from geutil.quantize.tflite.stored_weights import LeftInFloat
from geutil.tflite import kinds
from geutil.tflite.file import LiteFile
from geutil.tflite.kinds import (
    BIASED,
    CONVERSIONS,
    KINDS,
    OTHER,
    Kind,
    StepRule,
    version_of,
)
from geutil.tflite.parts import Array, LiteGraph, LiteOp, LiteTensor, Quantization
from geutil.tflite.type_changes import set_end

_SAME = 1e-5
"""Steps that differ by less than this share store the same."""
_MOST_STEPS = 2.0**26
"""A bias of 32 bits has so many steps at most, half of those above zero.

XNNPACK counts sixteenths of them where weights have 4 bits, and then 2**27 overflow.
"""
_CLIPS = {"RELU": np.inf, "RELU6": 6.0}
"""Ops that are the range of integers from 0 to an end, if that is the range's."""
_KEEPING = (StepRule.KEEPS, StepRule.SELECTS)
_RESHAPING = ("EXPAND_DIMS", "RESHAPE", "SQUEEZE")
"""Ops that leave all values in their order."""


@dataclass(frozen=True)
class _Width:
    """The integers that activations and biases are stored in."""

    dtype: str
    lowest: int
    highest: int
    bias: str

    def signed(self, tensor: LiteTensor) -> None:
        """Let a tensor that the converter stores without a sign have one."""
        steps = tensor.quantization
        if steps is None or tensor.dtype not in ("uint8", "uint16"):
            return
        (scale, *_), (zero, *_) = steps.scales, steps.zero_points
        if tensor.dtype == "uint8":
            tensor.dtype = "int8"
            tensor.quantization = Quantization((scale,), (zero - 128,))
            return
        reach = max(zero, 2**16 - 1 - zero)
        if abs(zero - 2**15) <= 1:
            reach = 32767
        tensor.dtype = "int16"
        tensor.quantization = Quantization((reach * scale / 32767,))

    def range_of(self, value: Array) -> Quantization:
        """Return steps that store the values of a constant."""
        low, high = min(0.0, float(value.min(initial=0))), float(value.max(initial=0))
        if self.dtype == "int16":
            return Quantization(((max(-low, high) or 1.0) / self.highest,))
        scale = (max(high, 0.0) - low or 1.0) / (self.highest - self.lowest)
        zero = round(self.lowest - low / scale)
        return Quantization((scale,), (min(max(zero, self.lowest), self.highest),))

    def levels(self, value: Array, steps: Quantization) -> Array:
        """Return the integers of values."""
        levels = np.round(value / steps.scales[0]) + steps.zero_points[0]
        return np.clip(levels, self.lowest, self.highest)


_WIDTHS = {
    8: _Width("int8", -128, 127, "int32"),
    16: _Width("int16", -32767, 32767, "int64"),
}


def lower(file: LiteFile, bits: int) -> list[LeftInFloat]:
    """Let the ops of a file compute in integers where they can."""
    called = {graph for op in file.ops for graph in op.subgraphs}
    left = []
    for graph in file.graphs:
        # A loop hands floats to its body, and takes floats from it.
        has_ends = graph not in called
        left += _Lowering(file, graph, _WIDTHS[bits]).lower(has_ends=has_ends)
    return left


def _same(one: Quantization | None, other: Quantization | None) -> bool:
    """Return whether steps store the same integers."""
    return (
        one is not None
        and other is not None
        and one.zero_points == other.zero_points
        and abs(one.scales[0] - other.scales[0]) <= _SAME * other.scales[0]
    )


class _Lowering:
    def __init__(self, file: LiteFile, graph: LiteGraph, width: _Width) -> None:
        self._file, self._graph, self._width = file, graph, width
        # By float tensors, the integers that they are dequantized from.
        self._stored: dict[LiteTensor, LiteTensor] = {}
        # By float tensors, the QUANTIZE ops that read them.
        self._quantizers: dict[LiteTensor, list[LiteOp]] = {}
        self._ops: list[LiteOp] = []
        self._left: list[LeftInFloat] = []
        self._done: set[LiteOp] = set()
        self._ends = {*graph.outputs}
        # By integers that were reshaped, those before.
        self._reshaped: dict[LiteTensor, LiteTensor] = {}
        # Integers that would be made of others and are the same.
        self._equal: dict[LiteTensor, LiteTensor] = {}

    def lower(self, *, has_ends: bool) -> list[LeftInFloat]:
        """Go through the ops in their order, which is topological."""
        for tensor in self._graph.tensors:
            self._width.signed(tensor)
        for op in self._graph.ops:
            if op.kind == "QUANTIZE":
                self._quantizers.setdefault(op.reads[0], []).append(op)
        self._quantize_earlier()
        for tensor in self._graph.inputs if has_ends else ():
            target = self._target(tensor)
            if target is not None:
                # Runtimes without signatures know inputs by these names.
                target.name, tensor.name = tensor.name, target.name
                set_end(self._file, self._graph, tensor, target)
                self._settle(tensor, target)
        for op in self._graph.ops:
            self._take(op)
        for tensor in self._graph.outputs if has_ends else ():
            stored = self._stored.get(tensor)
            if stored is not None and stored.value is None:
                set_end(self._file, self._graph, tensor, stored)
        self._graph.set_ops(self._ops)
        return self._left

    def _quantize_earlier(self) -> None:
        """Quantize data before ops that select values, rather than behind.

        The converter lets a Reshape of an input come first; a product in rows is
        quantized behind the Reshape that brings them back, and a layer behind its
        pooling. A Relu whose end the range has is no op at all then.
        """
        outputs = {*self._graph.outputs}
        ops: list[LiteOp] = []
        # From the end, so that of moves in a row each finds the steps put before it.
        for op in reversed(self._graph.ops):
            made = (t for t in op.outputs if t not in outputs)
            earlier = (new for t in made for new in self._quantized_earlier(t))
            ops += [*([] if op.kind == "DEQUANTIZE" else earlier), op]
        first = [new for t in self._graph.inputs for new in self._quantized_earlier(t)]
        self._graph.set_ops([*reversed(first), *reversed(ops)])

    def _quantized_earlier(self, tensor: LiteTensor) -> list[LiteOp]:
        """Return the ops that quantize a tensor for all that select its values."""
        if not _is_float(tensor) or self._target(tensor) is not None:
            return []
        readers = tensor.consumers
        wanted = [self._steps_behind(op, tensor) for op in readers]
        steps = next(iter(wanted), None)
        if steps is None or not all(_same(one, steps) for one in wanted):
            return []
        stored = self._new(tensor, steps)
        floats = LiteTensor(tensor.name, tensor.dtype, tensor.shape)
        quantize = LiteOp("QUANTIZE", [tensor], [stored])
        for op in readers:
            op.inputs = (floats if t is tensor else t for t in op.inputs)
        self._quantizers[tensor] = [quantize]
        return [LiteOp("DEQUANTIZE", [stored], [floats]), quantize]

    def _steps_behind(self, op: LiteOp, tensor: LiteTensor) -> Quantization | None:
        """Return the steps of elements that an op selects; None if it selects none."""
        kernel = KINDS.get(op.kind, OTHER)
        if kernel.rule is None or op.inputs[kernel.data] is not tensor:
            return None
        # Readers of their integers count, too.
        targets = [
            self._target(t)
            for t in op.outputs
            if _is_float(t) and (t.consumers or self._target(t))
        ]
        every = [None if t is None else t.quantization for t in targets]
        steps = next(iter(every), None)
        if steps is None or not all(_same(one, steps) for one in every):
            return None
        selects = kernel.rule is StepRule.SELECTS
        return steps if selects or self._is_in_range(op, steps) else None

    def _is_in_range(self, op: LiteOp, steps: Quantization) -> bool:
        """Return whether an op cuts values off where a range does."""
        most = _CLIPS.get(op.kind)
        if most is None or self._width.dtype != "int8":
            return False
        (scale, *_), (zero, *_) = steps.scales, steps.zero_points
        # The largest integer stands for no more than a Relu6 makes of it.
        return (
            zero == self._width.lowest
            and (self._width.highest - self._width.lowest - 0.5) * scale <= most
        )

    def _new(self, like: LiteTensor, steps: Quantization) -> LiteTensor:
        return LiteTensor(like.name, self._width.dtype, like.shape, steps)

    def _target(self, tensor: LiteTensor) -> LiteTensor | None:
        """Return the integers that a tensor is quantized to, if any."""
        made = (op.outputs[0] for op in self._quantizers.get(tensor, ()))
        return next((t for t in made if t.dtype == self._width.dtype), None)

    def _settle(self, tensor: LiteTensor, stored: LiteTensor) -> None:
        """Note that integers are there, from which floats and others are made."""
        self._stored[tensor] = stored
        self._keep(LiteOp("DEQUANTIZE", [stored], [tensor]))
        for op in self._quantizers.get(tensor, ()):
            self._done.add(op)
            (made,) = op.outputs
            if made.dtype == stored.dtype and _same(
                made.quantization, stored.quantization
            ):
                self._equal[made] = stored
            else:
                self._keep(LiteOp("QUANTIZE", [stored], [made]))

    def _keep(self, op: LiteOp) -> None:
        """Let the subgraph have an op, of the version that its types need."""
        needed = version_of(op)
        # The float file's conversions are of other types.
        known = 1 if op.kind in CONVERSIONS else op.version
        op.version = max(known, needed)
        self._ops.append(op)

    def _take(self, op: LiteOp) -> None:
        """Let an op compute in integers, or keep it as it is."""
        if op in self._done:
            return
        if op.kind == "DEQUANTIZE":
            source = self._equal.get(op.reads[0], op.reads[0])
            self._stored[op.outputs[0]] = source
            op.inputs = (source,)
        elif op.kind == "QUANTIZE":
            stored = self._stored.get(op.reads[0])
            if stored is not None and stored.value is None:
                op.inputs = (stored,)
        else:
            reason = self._lowered(op)
            if not reason:
                return
            if any(map(_is_float, op.outputs)) and not all(
                t is None or t.value is not None for t in op.inputs
            ):
                self._left.append(LeftInFloat(op.kind, op.outputs[0].name, reason))
        self._keep(op)

    def _lowered(self, op: LiteOp) -> str:
        """Let an op compute in integers; return why it cannot, or nothing."""
        kernel, dtype = KINDS.get(op.kind, OTHER), self._width.dtype
        if dtype not in kernel.widths:
            kind = (
                "an inexact" if dtype == "int16" and op.kind in kinds.INEXACT else "no"
            )
            return f"TFLite has {kind} {dtype} kernel for {op.kind}"
        # Weights and biases of layers are no data.
        only = BIASED[op.kind][0] if kernel.rule is StepRule.LAYER else None
        read = {
            slot: t
            for slot, t in enumerate(op.inputs)
            if t is not None and _is_float(t) and only in (None, slot)
        }
        for tensor in read.values():
            reason = self._obstacle(tensor)
            if reason:
                return reason
        data = [
            steps
            for tensor in read.values()
            if tensor.value is None and self._stored[tensor].value is None
            if (steps := self._stored[tensor].quantization) is not None
        ]
        data = data or self._steps_of_constants(op, kernel, read)
        if not data:
            return "it reads constants alone"
        steps_of: dict[LiteTensor, Quantization] = {}
        for tensor in filter(_is_float, op.outputs):
            steps = self._steps_of_result(op, kernel, tensor, data)
            if steps is None:
                return "its result is not quantized"
            steps_of[tensor] = steps
        if kernel.rule is StepRule.LAYER:
            reason = self._with_weights(op, data[0])
            if reason:
                return reason
        self._compute(op, kernel, read, steps_of, data)
        return ""

    def _steps_of_constants(
        self, op: LiteOp, kernel: Kind, read: Mapping[int, LiteTensor]
    ) -> list[Quantization]:
        """Return steps for constants that are all data of an op.

        It repeats them in a shape that is computed, or multiplies them by data in the
        place of weights.
        """
        weights = None
        if kernel.rule is StepRule.LAYER:
            weights = op.inputs[BIASED[op.kind][1]]
        if weights is not None and self._stored.get(weights, weights).value is None:
            stored = (self._integers(tensor, None) for tensor in read.values())
            return [t.quantization for t in stored if t.quantization is not None]
        is_computed = any(t is not None and t.value is None for t in op.inputs)
        if kernel.rule not in (*_KEEPING, StepRule.JOINS) or not is_computed:
            return []
        target = self._target(op.outputs[0])
        if target is not None and target.quantization is not None:
            return [target.quantization]
        # One number is stored exactly in any case.
        constants = (
            self._integers(tensor, None)
            for tensor in read.values()
            if int(np.prod(tensor.sizes)) == 1
        )
        return [t.quantization for t in constants if t.quantization is not None][:1]

    def _obstacle(self, tensor: LiteTensor) -> str:
        """Return why a tensor cannot be read in integers, or nothing."""
        if tensor.value is not None:
            return ""
        stored = self._stored.get(tensor)
        if stored is None or stored.quantization is None:
            return "its data are not quantized"
        if stored.dtype == self._width.dtype and stored.value is None:
            return ""
        if stored.value is None:
            return f"its data are {stored.dtype}"
        if len(stored.quantization.scales) > 1:
            return "it reads a constant with a range for each channel"
        if self._width.dtype == "int16" and stored.quantization.zero_points[0]:
            return "it reads a constant with a zero point"
        return ""

    def _steps_of_result(
        self, op: LiteOp, kernel: Kind, tensor: LiteTensor, data: Sequence[Quantization]
    ) -> Quantization | None:
        """Return the steps that a kernel makes a result in; None if not known."""
        if kernel.rule is StepRule.FIXED:
            scale, zero = kinds.FIXED_SCALE[op.kind, self._width.dtype]
            return Quantization((scale,), (zero,))
        if kernel.rule in _KEEPING:
            return data[0]
        target = self._target(tensor)
        if target is not None:
            return target.quantization
        if kernel.rule is StepRule.JOINS:
            return max(data, key=lambda steps: steps.scales[0], default=None)
        return None

    def _with_weights(self, op: LiteOp, data: Quantization) -> str:
        """Let a layer read stored weights, and a bias in integers."""
        _, of_weights, of_bias = BIASED[op.kind]
        floats = op.inputs[of_weights]
        weights = None if floats is None else self._stored.get(floats)
        steps = None if weights is None else weights.quantization
        if weights is None or steps is None or weights.dtype != "int8":
            return "its weights are not quantized in 8 bits"
        is_product = op.kind == "FULLY_CONNECTED" and weights.value is None
        if any(steps.zero_points) and not is_product:
            return "its weights have a zero point"
        bias = op.inputs[of_bias] if len(op.inputs) > of_bias else None
        value = None if bias is None else bias.value
        if bias is not None and value is None:
            return "its bias is no constant"
        inputs = [*op.inputs]
        if bias is not None and value is not None:
            weights = self._wide_enough(weights, steps, value, data)
            inputs[of_bias] = self._bias(bias, value, weights, data)
        inputs[of_weights] = weights
        op.inputs = inputs
        return ""

    def _wide_enough(
        self, weights: LiteTensor, steps: Quantization, bias: Array, data: Quantization
    ) -> LiteTensor:
        """Return weights in steps so large that a bias fits into 32 bits.

        Of weights that are nearly zero the steps are so small that it overflows; it
        outweighs them by far.
        """
        if self._width.bias != "int32" or weights.value is None:
            return weights
        scales = np.asarray(steps.scales, np.float64)
        # A scale for all channels has to do for the largest bias.
        largest = np.abs(bias) if scales.size > 1 else np.abs(bias).max(initial=0.0)
        least = np.broadcast_to(largest / (_MOST_STEPS * data.scales[0]), scales.shape)
        if np.all(scales >= least):
            return weights
        new = np.maximum(scales, least).astype(np.float32)
        wide = replace(steps, scales=tuple(new.tolist()))
        value, other = weights.value, weights.copied()
        old, along = (s.along(value.ndim)[0] for s in (steps, wide))
        other.value = np.round(value * (old.astype(np.float64) / along))
        other.quantization = wide
        return other

    def _bias(
        self, bias: LiteTensor, value: Array, weights: LiteTensor, data: Quantization
    ) -> LiteTensor:
        """Return a bias in steps of the data's times the weights'."""
        steps = weights.quantization or data
        scales = np.asarray(steps.scales, np.float64) * data.scales[0]
        new = LiteTensor(bias.name, self._width.bias, bias.shape)
        new.value = np.round(value.astype(np.float64) / scales)
        stored = tuple(scales.astype(np.float32).tolist())
        new.quantization = Quantization(stored, (0,) * len(stored))
        return new

    def _compute(
        self,
        op: LiteOp,
        kernel: Kind,
        read: Mapping[int, LiteTensor],
        steps_of: dict[LiteTensor, Quantization],
        data: Sequence[Quantization],
    ) -> None:
        """Let an op read and make integers."""
        joint = None
        if kernel.rule is StepRule.JOINS:
            joint = next(iter(steps_of.values()), None)
        elif kernel.rule in _KEEPING:
            joint = data[0]
        inputs = [*op.inputs]
        for slot, tensor in read.items():
            inputs[slot] = self._integers(tensor, joint)
        op.inputs = inputs
        if op.kind in _RESHAPING and self._is_undone(op, steps_of):
            return
        if "pot_scale_int16" in op.options:
            # Else steps have to be powers of two.
            op.options["pot_scale_int16"] = False
        if any(self._is_in_range(op, steps) for steps in steps_of.values()):
            ((result, steps),) = steps_of.items()
            (stored,) = (t for t in op.inputs if t is not None)
            if _same(stored.quantization, steps):
                self._settle(result, stored)
                return
            # Kernels of Relus loop over values one by one, and XNNPACK leaves them so
            # (LiteRT 2.3; 56x56x32 values on one x86 thread: 0.65 ms, QUANTIZE 0.065).
            op = LiteOp("QUANTIZE", op.inputs, op.outputs)
        results = {t: self._result(t, steps) for t, steps in steps_of.items()}
        op.outputs = (results.get(t, t) for t in op.outputs)
        self._keep(op)
        for tensor, stored in results.items():
            if op.kind in _RESHAPING and op.inputs[0] is not None:
                self._reshaped[stored] = op.inputs[0]
            self._settle(tensor, stored)

    def _is_undone(
        self, op: LiteOp, steps_of: Mapping[LiteTensor, Quantization]
    ) -> bool:
        """Return whether a reshaped tensor gets its shape again; let a Reshape read it.

        The converter leaves both ops where data are quantized between them.
        """
        made, *others = op.inputs
        source = None if made is None else self._reshaped.get(made)
        if source is None or source.shape is None:
            return False
        ((result, _),) = steps_of.items()
        # Of one unknown size the others tell which it is.
        is_known = sum(size is None for size in source.shape) <= 1
        if is_known and source.shape == result.shape and result not in self._ends:
            self._settle(result, source)
            return True
        if op.kind == "RESHAPE":
            op.inputs = (source, *others)
        return False

    def _integers(self, tensor: LiteTensor, steps: Quantization | None) -> LiteTensor:
        """Return the integers of a tensor, in some steps if these are given."""
        value = tensor.value
        if value is not None:
            return self._constant(tensor, value, steps or self._width.range_of(value))
        stored = self._stored[tensor]
        own, value = stored.quantization, stored.value
        if own is None:
            return stored
        is_stored = stored.dtype == self._width.dtype
        # FILL compares steps to the last bit, and those of constants can be any.
        is_exact = steps is None or own == steps
        if is_stored and (is_exact or (value is None and _same(own, steps))):
            return stored
        if value is None:
            other = self._new(stored, steps or own)
            self._keep(LiteOp("QUANTIZE", [stored], [other]))
            return other
        scale, zero = own.along(value.ndim)
        return self._constant(
            tensor, (value.astype(np.float64) - zero) * scale, steps or own
        )

    def _constant(
        self, tensor: LiteTensor, value: Array, steps: Quantization
    ) -> LiteTensor:
        new = self._new(tensor, steps)
        new.value = self._width.levels(value, steps)
        return new

    def _result(self, tensor: LiteTensor, steps: Quantization) -> LiteTensor:
        """Return the integers that an op makes in the place of floats."""
        stored = self._target(tensor)
        if stored is None or not _same(stored.quantization, steps):
            return self._new(tensor, steps)
        stored.quantization = steps
        # Files tell the ops of a kernel by the name of its result.
        stored.name, tensor.name = tensor.name, stored.name
        return stored


def _is_float(tensor: LiteTensor) -> bool:
    return tensor.dtype == "float32"
