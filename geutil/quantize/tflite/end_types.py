"""Types of the inputs and outputs of a file, other than its kernels have.

A QUANTIZE op behind an input, or in front of an output, changes the type and not the
value: an unsigned integer is the signed one plus 128, in the same steps. Floats are
rounded behind an input, and made of integers in front of an output by a DEQUANTIZE op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.types import type_name
from geutil.quantize.int8.running import file_names
from geutil.tflite import old_edits as tflite_edits
from geutil.tflite.run import packed, unpacked

Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""

_CHOICES = {
    "INT8": ("int8", "uint8", "float32"),
    "INT16": ("int16", "float32"),
    "FLOAT32": ("float32",),
}
"""By the type that a file's kernels read or make, the types that an end can have."""
_NAMES = tuple(dict.fromkeys(name for names in _CHOICES.values() for name in names))
_VERSIONS = {"INT8": 2, "INT16": 3}
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
        model = unpacked(blob)
        (signature,) = model.signatureDefs
        graph = model.subgraphs[signature.subgraphIndex]
        ends = _Ends(model, graph)
        for end in signature.inputs:
            name, wanted = self._inputs.get(end.name.decode(), ("", ""))
            if wanted and ends.changes("input", name, wanted, end, self._named[0]):
                ends.take(end, wanted)
        for end in signature.outputs:
            name, wanted = self._outputs.get(end.name.decode(), ("", ""))
            if wanted and ends.changes("output", name, wanted, end, self._named[1]):
                ends.give(end, wanted)
        ends.rename()
        return packed(model)


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


class _Ends:
    """The ends of a file's graph, which is changed."""

    def __init__(self, model: Any, graph: Any) -> None:
        self._model, self._graph = model, graph
        # By tensor and type, what an output is changed to.
        self._given: dict[tuple[int, str], int] = {}
        self._changed: list[int] = []

    def changes(self, what: str, name: str, wanted: str, end: Any, named: bool) -> bool:
        """Tell whether an end has another type than it is to have.

        Raises:
            QuantizeError: it cannot have that.
        """
        tensor = self._graph.tensors[end.tensorIndex]
        kind = tflite_edits.type_of(tensor)
        is_quantized = tflite_edits.steps_of(tensor) is not None
        own = is_quantized or kind == "FLOAT32"
        choices = _CHOICES.get(kind, ()) if own else ()
        if wanted in choices:
            return wanted != kind.lower()
        if not choices and not named:
            return False
        if is_quantized:
            reason = f"is stored in {kind.lower()}, and can be {' or '.join(choices)}"
            remedy = "pass one of these, or quantize by another scheme"
        elif choices:
            reason = "is left in float"
            remedy = "leave it out, by a mapping from the names of others to types"
        else:
            reason = f"holds {kind.lower()}, which stand for themselves"
            remedy = "leave it out"
        raise QuantizeError(
            f"{what} '{name}' of the file cannot be {wanted}: it {reason}; {remedy}"
        )

    def take(self, end: Any, wanted: str) -> None:
        """Let the file take another type, and change it before all else."""
        index = int(end.tensorIndex)
        new = self._end(index, wanted)
        self._graph.inputs[self._graph.inputs == index] = new
        end.tensorIndex = new
        self._graph.operators.insert(0, self._op("QUANTIZE", new, index))

    def give(self, end: Any, wanted: str) -> None:
        """Let the file give another type, and change to it after all else."""
        index = int(end.tensorIndex)
        new = self._given.get((index, wanted))
        if new is None:
            new = self._given[index, wanted] = self._end(index, wanted)
            kind = "DEQUANTIZE" if wanted == "float32" else "QUANTIZE"
            self._graph.operators.append(self._op(kind, index, new))
        places = [p for p, i in enumerate(self._graph.outputs) if i == index]
        self._graph.outputs[places[0]] = new
        end.tensorIndex = new

    def _op(self, kind: str, source: int, made: int) -> Any:
        types = [tflite_edits.type_of(self._graph.tensors[i]) for i in (source, made)]
        version = max(_VERSIONS.get(name, 0) for name in types)
        return tflite_edits.new_op(self._model, kind, [source], [made], version)

    def _end(self, index: int, wanted: str) -> int:
        """Return a new tensor of a type, with the name of another one."""
        tensor = self._graph.tensors[index]
        new = tflite_edits.new_tensor(self._graph, tensor)
        made = self._graph.tensors[new]
        tflite_edits.set_type(made, wanted.upper())
        if wanted == "uint8":
            zero = int(tflite_edits.zeros_of(tensor)[0]) + _UNSIGNED
            tflite_edits.set_steps(made, tflite_edits.known_steps(tensor), zero=zero)
        self._changed.append(index)
        return new

    def rename(self) -> None:
        """Give what is no end any more a name of its own, as the converter does."""
        ends = {*map(int, self._graph.inputs), *map(int, self._graph.outputs)}
        for index in {*self._changed} - ends:
            tensor = self._graph.tensors[index]
            tensor.name = re.sub(rb"^[^;:]*", rb"\g<0>1", tensor.name)
