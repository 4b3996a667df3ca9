"""Types of the inputs and outputs of a file, other than its kernels have.

A QUANTIZE op behind an input, or in front of an output, changes the type and not the
value: an unsigned integer is the signed one plus 128, in the same steps. Floats are
rounded behind an input, and made of integers in front of an output by a DEQUANTIZE op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.types import type_name
from geutil.tflite import LiteOp, LiteSignature, LiteTensor, Quantization
from geutil.tflite.names import file_names

Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""

_CHOICES = {
    "int8": ("int8", "uint8", "float32"),
    "int16": ("int16", "float32"),
    "float32": ("float32",),
}
"""By the type that a file's kernels read or make, the types that an end can have."""
_NAMES = tuple(dict.fromkeys(name for names in _CHOICES.values() for name in names))
_VERSIONS = {"int8": 2, "int16": 3}
_UNSIGNED = 128


class EndTypes:
    """The types that a caller wants the ends of a model's file to have.

    Args:
        model: the model.
        inputs: the types of its inputs.
        outputs: the types of its outputs.

    Raises:
        ArgumentTypeError: the types are something else.
        QuantizeError: there is no such type, or no such input or output.
    """

    def __init__(self, model: Any, inputs: Types, outputs: Types) -> None:
        self._inputs = _by_name("input", list(model.inputs), inputs)
        self._outputs = _by_name("output", list(model.outputs), outputs)
        # What is named has to have its type; of all, integers stay what they are.
        self._named = isinstance(inputs, Mapping), isinstance(outputs, Mapping)

    def given(self, blob: bytes) -> bytes:
        """Return a file whose ends have these types.

        Raises:
            QuantizeError: one cannot have its type.

        Cost: linear in the file.
        """
        if not self._inputs and not self._outputs:
            return blob
        file = tflite.open(blob)
        (signature,) = file.signatures.values()
        ends = _Ends(signature)
        for file_name in signature.inputs:
            name, wanted = self._inputs.get(file_name, ("", ""))
            tensor = signature.inputs[file_name]
            if wanted and _changes("input", name, wanted, tensor, self._named[0]):
                ends.take(file_name, wanted)
        for file_name in signature.outputs:
            name, wanted = self._outputs.get(file_name, ("", ""))
            tensor = signature.outputs[file_name]
            if wanted and _changes("output", name, wanted, tensor, self._named[1]):
                ends.give(file_name, wanted)
        ends.rename()
        return file.to_bytes()


def _by_name(
    what: str, names: Iterable[str], types: Types
) -> dict[str, tuple[str, str]]:
    """Return by their names in a file the names and the types of ends.

    Raises:
        ArgumentTypeError: `types` is something else.
        QuantizeError: there is no such type, or no such end.
    """
    if types is not None and not isinstance(types, str | Mapping):
        raise ArgumentTypeError(
            f"{what}_type is the name of a type, or a mapping from names to such, not "
            f"{type_name(types)}"
        )
    file_name_of = file_names([*names])
    wanted = dict.fromkeys(file_name_of, types) if isinstance(types, str) else types
    for name, kind in (wanted or {}).items():
        if name not in file_name_of:
            raise QuantizeError(
                f"the model has no {what} '{name}' to give a type; its {what}s are "
                f"{', '.join(file_name_of)}"
            )
        if kind not in _NAMES:
            raise QuantizeError(
                f"there is no type '{kind}' of {what}s; the types are "
                f"{', '.join(_NAMES)}"
            )
    return {file_name_of[name]: (name, kind) for name, kind in (wanted or {}).items()}


def _changes(
    what: str, name: str, wanted: str, tensor: LiteTensor, named: bool
) -> bool:
    """Tell whether an end has another type than it is to have.

    Raises:
        QuantizeError: it cannot have that.
    """
    kind, is_quantized = tensor.dtype, tensor.quantization is not None
    own = is_quantized or kind == "float32"
    choices = _CHOICES.get(kind, ()) if own else ()
    if wanted in choices:
        return wanted != kind
    if not choices and not named:
        return False
    if is_quantized:
        reason = f"is stored in {kind}, and can be {' or '.join(choices)}"
        remedy = "pass one of these, or quantize by another scheme"
    elif choices:
        reason = "is left in float"
        remedy = "leave it out, by a mapping from the names of others to types"
    else:
        reason = f"holds {kind}, which stand for themselves"
        remedy = "leave it out"
    raise QuantizeError(
        f"{what} '{name}' of the file cannot be {wanted}: it {reason}; {remedy}"
    )


class _Ends:
    """The ends of a file's graph, which is changed."""

    def __init__(self, signature: LiteSignature) -> None:
        self._signature, self._graph = signature, signature.graph
        # By tensor and type, what an output is changed to.
        self._given: dict[tuple[LiteTensor, str], LiteTensor] = {}
        self._changed: dict[LiteTensor, None] = {}

    def take(self, name: str, wanted: str) -> None:
        """Let the file take another type, and change it before all else."""
        old = self._signature.inputs[name]
        new = self._signature.inputs[name] = self._end(old, wanted)
        graph = self._graph
        graph.inputs = tuple(new if t is old else t for t in graph.inputs)
        graph.add_op(_conversion("QUANTIZE", new, old), at=0)

    def give(self, name: str, wanted: str) -> None:
        """Let the file give another type, and change to it after all else."""
        old = self._signature.outputs[name]
        new = self._given.get((old, wanted))
        if new is None:
            new = self._given[old, wanted] = self._end(old, wanted)
            kind = "DEQUANTIZE" if wanted == "float32" else "QUANTIZE"
            self._graph.add_op(_conversion(kind, old, new))
        outputs = [*self._graph.outputs]
        outputs[outputs.index(old)] = self._signature.outputs[name] = new
        self._graph.outputs = tuple(outputs)

    def _end(self, tensor: LiteTensor, wanted: str) -> LiteTensor:
        """Return a new tensor of a type, with the name of another one."""
        new = self._graph.add_tensor(tensor.like(wanted))
        if wanted == "uint8":
            steps = tensor.in_steps()
            zero = steps.zero_points[0] + _UNSIGNED
            new.quantization = Quantization.of(steps.sizes, zero=zero)
        self._changed[tensor] = None
        return new

    def rename(self) -> None:
        """Give what is no end any more a name of its own, as the converter does."""
        ends = {*self._graph.inputs, *self._graph.outputs}
        for tensor in self._changed:
            if tensor not in ends:
                tensor.name = re.sub(r"^[^;:]*", r"\g<0>1", tensor.name)


def _conversion(kind: str, source: LiteTensor, made: LiteTensor) -> LiteOp:
    version = max(_VERSIONS.get(t.dtype, 0) for t in (source, made))
    return LiteOp(kind, [source], [made], version=version)
