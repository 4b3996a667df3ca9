"""Runs TFLite files on inputs by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError, Words
from geutil.graph.types import type_name
from geutil.tflite import LiteFile, LiteOp, LiteTensor
from geutil.tflite.interpreter import new_interpreter
from geutil.tflite.kinds import is_float
from geutil.tflite.op_names import file_names
from geutil.tflite.parts import Array

# Derived: windows of 7 behind five halvings need 7 * 2**5 pixels.
_LARGE = 256
# TFLite's ADD shifts its addends by 20 bits, and doubles the larger step (add.cc).
_TOO_FAR = 2.0**19
_OTHER = Words("it is of another model, or was not made by geutil.quantize.to_int8")
_SKIP = Words("overrides={name: 'skip'}", "REGEX")


class Runner:
    """A TFLite file, run by TFLite's own kernels without delegates."""

    def __init__(
        self,
        blob: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        keep_tensors: bool = False,
    ) -> None:
        """Open the file; refuse one of several signatures, or of other inputs."""
        interpreter = interpreter_of(blob, keep_tensors=keep_tensors)
        self.file = tflite.open(bytes(blob))
        self._interpreter = interpreter
        signatures = list(interpreter.get_signature_list())
        if len(signatures) != 1:
            raise QuantizeError(
                f"the TFLite file has {len(signatures)} signatures, and not one; "
                f"{_OTHER}"
            )
        self._run = interpreter.get_signature_runner(signatures[0])
        self._inputs = _ends("inputs", inputs, self._run.get_input_details())
        self._outputs = _ends("outputs", outputs, self._run.get_output_details())
        self._integers = _integers_of_floats(self.file)
        self._places = {
            tensor: (place, number)
            for number, graph in enumerate(self.file.graphs)
            for place, tensor in enumerate(graph.tensors)
        }

    def quantization(self, output: str) -> tuple[float, int]:
        """Return the size of a step of an output, and its zero point.

        Integers that stand for themselves have steps of 1. Floats have the steps of the
        integers that they are made of, and 0 for a zero point; others a step of 0.
        """
        detail = self._outputs[output]
        scale, zero = detail["quantization"]
        if np.issubdtype(detail["dtype"], np.floating):
            integers = self._integers.get(detail["index"])
            return (integers.scale if integers else 0.0), 0
        return (float(scale), int(zero)) if scale else (1.0, 0)

    def tensor(self, tensor: LiteTensor) -> Array:
        """Return a tensor of the last run, as it is stored; they have to be kept."""
        return np.asarray(self._interpreter.get_tensor(*self._places[tensor]))

    def stored(self, sample: Mapping[str, Any]) -> dict[str, Array]:
        """Return inputs as the file takes them: nearest integers, or their values."""
        stored = {}
        for name, detail in self._inputs.items():
            value, (scale, zero) = np.asarray(sample[name]), detail["quantization"]
            integers = self._integers.get(detail["index"])
            if integers is not None:
                stored[name] = integers.value(integers.stored(value))
            elif scale:
                stored[name] = _Integers(detail["dtype"], scale, zero).stored(value)
            else:
                stored[name] = value.astype(detail["dtype"])
        return stored

    def values(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of stored inputs, as the model takes them."""
        return {
            name: _value(stored[name], detail) for name, detail in self._inputs.items()
        }

    def results(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of stored outputs, as the model gives them."""
        return {
            name: _value(stored[name], detail) for name, detail in self._outputs.items()
        }

    def run(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name, as they are stored, for stored inputs."""
        names = _names_in(self._run.get_input_details(), list(self._inputs))
        try:
            outputs = self._run(**{names[name]: stored[name] for name in names})
        except (ValueError, RuntimeError) as error:
            raise QuantizeError(
                f"TFLite's interpreter fails on this sample: {error}; the kernel that "
                "it names does not take what it reads: bring that into its domain in "
                "the model, with tf.maximum before a square root, say"
            ) from error
        names = _names_in(self._run.get_output_details(), list(self._outputs))
        return {name: outputs[names[name]] for name in names}


def interpreter_of(blob: bytes, *, keep_tensors: bool = False) -> Any:
    """Return an interpreter of a TFLite file, with its tensors allocated."""
    if not isinstance(blob, bytes | bytearray):
        raise ArgumentTypeError(
            f"a TFLite file is given as bytes, not as {type_name(blob)}; read the file "
            "with pathlib.Path(...).read_bytes()"
        )
    try:
        interpreter = new_interpreter(bytes(blob), keep_tensors=keep_tensors)
        _check_sums(tflite.open(bytes(blob)).ops)
        _allocate(interpreter)
    except (ValueError, RuntimeError) as error:
        raise QuantizeError(f"TFLite cannot run the file: {error}") from error
    return interpreter


def _check_sums(ops: Iterable[LiteOp]) -> None:
    """Refuse sums at which TFLite ends the process (TensorFlow 2.21)."""
    for op in ops:
        tensors = (*op.reads, *op.outputs)
        if op.kind not in ("ADD", "SUB") or {t.dtype for t in tensors} != {"int8"}:
            continue
        scales = [() if (q := t.quantization) is None else q.scales for t in tensors]
        *addend_steps, result_step = (max(each, default=0.0) for each in scales)
        if max(addend_steps) >= _TOO_FAR * result_step:
            raise QuantizeError(
                f"TFLite would end the process: {op.kind} '{op.result}' adds in steps "
                f"of {max(addend_steps):.2g} to a result in steps of "
                f"{result_step:.2g}. Let the model add smaller numbers, -1e4 for "
                "example in a mask of -1e9; or leave what makes them float, with "
                f"{_SKIP}"
            )


def _allocate(interpreter: Any) -> None:
    """Allocate tensors; where sizes are not known, for some that are large enough.

    Without zeros around it a window does not fit into the smallest images.
    """
    try:
        interpreter.allocate_tensors()
    except RuntimeError:
        details = interpreter.get_input_details()
        if all(-1 not in detail["shape_signature"] for detail in details):
            raise
        for detail in details:
            sizes = [_LARGE if n == -1 else n for n in detail["shape_signature"]]
            interpreter.resize_tensor_input(detail["index"], sizes)
        interpreter.allocate_tensors()


def _ends(
    what: str, names: Sequence[str], details: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the details of inputs or outputs of a file, by the names of the model."""
    file_name_of = _names_in(details, names)
    if set(file_name_of.values()) != set(details):
        raise QuantizeError(
            f"the model has the {what} {sorted(names)}, and the TFLite file "
            f"{sorted(details)}; {_OTHER}"
        )
    return {name: details[file_name_of[name]] for name in names}


def _names_in(details: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the names of ends in a file; files of others may have any."""
    if set(names) == set(details):
        return {name: name for name in names}
    return file_names(names)


@dataclass(frozen=True)
class _Integers:
    """Integers that stand for numbers: `scale * (integer - zero)`."""

    dtype: Any
    scale: float
    zero: int

    def stored(self, value: Array) -> Array:
        """Return the integers that are nearest to values."""
        limits = np.iinfo(self.dtype)
        levels = np.round(value / self.scale) + self.zero
        return np.clip(levels, limits.min, limits.max).astype(self.dtype)

    def value(self, stored: Array) -> Array:
        """Return the values of integers."""
        levels = stored.astype(np.float32) - np.float32(self.zero)
        return levels * np.float32(self.scale)


def _integers_of_floats(file: LiteFile) -> dict[int, _Integers]:
    """Return by float inputs and outputs of a file what they are rounded to, if any."""
    graph = next(iter(file.signatures.values())).graph
    ends = {*graph.inputs, *graph.outputs}
    place = {tensor: i for i, tensor in enumerate(graph.tensors)}
    found = {}
    for op in graph.ops:
        # An input that another op reads in float has values between the steps.
        if op.kind == "QUANTIZE" and op.reads[0].readers == {op: 1}:
            floats, stored = op.reads[0], op.outputs[0]
        elif op.kind == "DEQUANTIZE":
            stored, floats = op.reads[0], op.outputs[0]
        else:
            continue
        steps = stored.quantization
        if floats not in ends or not is_float(floats.dtype) or steps is None:
            continue
        if len(steps.scales) == 1:
            dtype, zero = np.dtype(stored.dtype), steps.zero_points[0]
            found[place[floats]] = _Integers(dtype, steps.scales[0], zero)
    return found


def _value(stored: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero = detail["quantization"]
    return _Integers(stored.dtype, scale, zero).value(stored) if scale else stored
