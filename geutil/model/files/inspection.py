"""Inspections: the facts of a model, from its files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geutil.lazy import Shown
from geutil.sizes import size_text

# Entries of each list of a printed inspection; the rest is counted.
_SHOWN = 10


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and shape.

    Attributes:
        dtype: the name of its type, such as "float32", which equals `tf.float32`. None
            if the file gives one that is not known here.
        shape: its size in each dimension, None where it is free; None as a whole if
            not even the rank is known.
    """

    dtype: str | None
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        name = self.dtype or "unknown"
        if self.shape is None:
            return f"{name} of unknown rank"
        return f"{name} [{','.join('n' if s is None else str(s) for s in self.shape)}]"

    @property
    def elements(self) -> int:
        """The number of elements, 0 if a size is free."""
        count = 1
        for size in self.shape if self.shape is not None else (0,):
            count *= size or 0
        return count


@dataclass(frozen=True)
class SignatureInfo:
    """The inputs and outputs of a signature by name."""

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class FunctionInfo:
    """A function of the library.

    Attributes:
        ops: how many ops its body has.
    """

    name: str
    ops: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class VariableInfo:
    """A variable.

    Attributes:
        name: its name; in a model without an object graph, its key in the checkpoint.
        trainable: whether it is trained; None if the files do not say.
    """

    name: str
    tensor: TensorInfo
    trainable: bool | None


@dataclass(frozen=True)
class LayerInfo:
    """A layer of a Keras model."""

    name: str
    type: str


@dataclass(frozen=True)
class Inspection(Shown):
    """The facts in a model's files. Fields that do not apply to its kind are empty.

    Attributes:
        kind: "SavedModel", "GraphDef", "Keras" or "TFLite".
        path: the file or folder that was inspected.
        tags: the tags of the MetaGraph.
        version: the version of TensorFlow (of Keras, for a .keras file) that wrote it;
            "" if the file does not say.
        signatures: inputs and outputs by the name of the signature.
        aliases: the names of duplicate signatures, mapped to the one that they equal:
            Keras exports one as "serve" and as "serving_default".
        ops: the number of ops of each type in the main graph, most frequent first.
        function_ops: the same for all functions together.
        functions: the functions of the library, in order.
        variables: the variables.
        assets: the names of asset files.
        layers: the layers of a Keras model.
        bytes_total: the size of all files.
        bytes_variables: the size of the files of variables.
        bytes_constants: the bytes of the constants' values in the file.
    """

    kind: str
    path: Path
    tags: tuple[str, ...] = ()
    version: str = ""
    signatures: Mapping[str, SignatureInfo] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, int] = field(default_factory=dict)
    function_ops: Mapping[str, int] = field(default_factory=dict)
    functions: tuple[FunctionInfo, ...] = ()
    variables: tuple[VariableInfo, ...] = ()
    assets: tuple[str, ...] = ()
    layers: tuple[LayerInfo, ...] = ()
    bytes_total: int = 0
    bytes_variables: int = 0
    bytes_constants: int = 0

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def lines_of(info: Inspection) -> Iterable[str]:
    """Yield the lines that describe a file; lists that are empty are left out."""
    by = f", written by version {info.version}" if info.version else ""
    yield f"{info.kind} {info.path}{by}"
    if info.tags:
        yield f"tags: {', '.join(info.tags)}"
    total, variables, constants = map(
        size_text, (info.bytes_total, info.bytes_variables, info.bytes_constants)
    )
    yield f"size: {total}, of it variables {variables}, constants {constants}"
    for name, signature in info.signatures.items():
        if name not in info.aliases:
            others = [alias for alias, of in info.aliases.items() if of == name]
            also = f", also called {', '.join(others)}" if others else ""
            yield from signature_lines(f"signature {name}{also}", signature)
    yield from counted("ops", info.ops)
    yield from counted("ops in functions", info.function_ops)
    if info.function_ops:
        yield "  a model that is opened has these ops in the place of the calls"
    yield from listed(
        "functions",
        [f"{f.name}: {f.ops} ops, {f.inputs} -> {f.outputs}" for f in info.functions],
    )
    yield from listed(
        "variables",
        [
            f"{v.name}: {v.tensor}" + (" (frozen)" if v.trainable is False else "")
            for v in info.variables
        ],
    )
    yield from listed("layers", [f"{x.name}: {x.type}" for x in info.layers])
    if info.assets:
        yield f"assets: {', '.join(info.assets)}"


def signature_lines(heading: str, signature: SignatureInfo) -> Iterable[str]:
    """Yield a heading and a line for each input and output."""
    yield heading
    for role, tensors in (("in ", signature.inputs), ("out", signature.outputs)):
        for key, tensor in tensors.items():
            yield f"  {role} {key}: {tensor}"


def counted(what: str, counts: Mapping[str, int]) -> Iterable[str]:
    """Yield a line that says how many there are of each; none if there are none."""
    if counts:
        shown = ", ".join(f"{n} {op}" for op, n in list(counts.items())[:_SHOWN])
        more = f" and {len(counts) - _SHOWN} types more" if len(counts) > _SHOWN else ""
        yield f"{what}: {sum(counts.values())} ({shown}{more})"


def listed(what: str, items: list[str]) -> Iterable[str]:
    """Yield a heading and the first items of a list; nothing if it is empty."""
    if items:
        yield f"{what}: {len(items)}"
        yield from (f"  {item}" for item in items[:_SHOWN])
        if len(items) > _SHOWN:
            yield f"  and {len(items) - _SHOWN} more"
