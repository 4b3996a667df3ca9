"""Types of the inputs and outputs of a model's file, other than its kernels have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError, TFLiteError
from geutil.graph.types import type_name
from geutil.tflite.ends import End, set_types
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


class EndTypes:
    """The types that a caller wants the ends of a model's file to have."""

    def __init__(self, model: Any, inputs: Types, outputs: Types) -> None:
        self._wanted = {
            "input": _by_name("input", list(model.inputs), inputs),
            "output": _by_name("output", list(model.outputs), outputs),
        }
        # A named end has to have its type; among all ends, integers keep theirs.
        self._named = {
            "input": isinstance(inputs, Mapping),
            "output": isinstance(outputs, Mapping),
        }

    def given(self, blob: bytes) -> bytes:
        """Return a file whose ends have these types."""
        if not any(self._wanted.values()):
            return blob
        file = tflite.open(blob)
        (signature,) = file.signatures.values()
        sides = {"input": signature.inputs, "output": signature.outputs}
        ends = [
            End(what, name, wanted, self._named[what], tensor, key)
            for what, tensors in sides.items()
            for key, tensor in tensors.items()
            for name, wanted in [self._wanted[what].get(key, ("", ""))]
            if wanted
        ]
        try:
            set_types(file, signature.graph, ends, _CHOICES)
        except TFLiteError as error:
            raise QuantizeError(str(error)) from error
        return file.to_bytes()


def _by_name(
    what: str, names: Iterable[str], types: Types
) -> dict[str, tuple[str, str]]:
    """Return by their names in a file the names and the types of ends."""
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
