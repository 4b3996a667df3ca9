"""Inspections: the facts of a model from its files alone; those of TFLite files.

Those of TFLite files have the quantization and the types that ops compute in, without
an interpreter. Other files are read in `proto_files` and `keras_files`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geutil import tflite
from geutil.errors import ModelError
from geutil.lazy import Shown
from geutil.sizes import size_text
from geutil.tflite import LiteFile, LiteTensor, Quantization
from geutil.tflite.kinds import (
    SlowOps,
    by_count,
    precision_of,
    slow_ops,
    stored_bytes,
)
from geutil.tflite.parts import FLEX

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


TFLITE = "TFLite"


@dataclass(frozen=True)
class TFLiteTensorInfo(TensorInfo):
    """A tensor's type, shape and quantization.

    Attributes:
        dtype: the name of its type, such as "int8".
        shape: its size in each dimension, None where it is free; None as a whole if not
            even the rank is known.
        quantization: its scale and zero point; None if it is not quantized.
    """

    quantization: Quantization | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.quantization is None else f"{text}, {self.quantization}"


@dataclass(frozen=True)
class TFLiteInspection(Inspection):
    """The contents of a TFLite file; `functions` are its subgraphs after the main one.

    Attributes:
        ends: the inputs and outputs of the main subgraph, by the names of its tensors,
            for files without signatures.
        precisions: the number of ops of each op type, in all subgraphs, by the type
            they compute in, such as "int8", "float32" or "int8 with int4 weights".
        weights: the bytes of constants by their type, such as "int8".
        custom_ops: the number of ops without a builtin TFLite kernel, by type.
        flex_ops: the number of ops that need TensorFlow's kernels, by type.
        slow_ops: the ops whose kernels are slow on CPUs; see `geutil.tflite.kinds`.
        metadata: the names of other entries stored in the file.
        description: the converter's description of itself.
    """

    ends: SignatureInfo = field(default_factory=lambda: SignatureInfo({}, {}))
    precisions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    custom_ops: Mapping[str, int] = field(default_factory=dict)
    flex_ops: Mapping[str, int] = field(default_factory=dict)
    slow_ops: tuple[SlowOps, ...] = ()
    metadata: tuple[str, ...] = ()
    description: str = ""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(info: TFLiteInspection) -> Iterable[str]:
    """Yield the lines of a report: the file, its ends, then the ops by device."""
    needs = f", needs runtime {info.version} or later" if info.version else ""
    yield f"{info.kind} {info.path}{needs}"
    sizes = {dtype: size_text(n) for dtype, n in info.weights.items()}
    weights = ", ".join(f"{dtype} {size}" for dtype, size in sizes.items())
    yield (
        f"size: {size_text(info.bytes_total)}, of it weights and other "
        f"constants {size_text(info.bytes_constants)}"
        + (f" ({weights})" if weights else "")
    )
    if not info.signatures:
        yield from signature_lines("no signature", info.ends)
    for name, signature in info.signatures.items():
        yield from signature_lines(f"signature {name}", signature)
    yield from counted("ops", info.ops)
    yield from counted("ops in other subgraphs", info.function_ops)
    for precision, counts in info.precisions.items():
        yield from counted(f"ops in {precision}", counts)
    yield from counted("ops of TensorFlow (flex)", info.flex_ops)
    yield from counted("custom ops", info.custom_ops)
    yield from listed("slow on CPUs", [str(ops) for ops in info.slow_ops])
    yield from listed(
        "subgraphs behind the main one",
        [f"{f.name}: {f.ops} ops, {f.inputs} -> {f.outputs}" for f in info.functions],
    )
    if info.metadata:
        yield f"metadata: {', '.join(info.metadata)}"


def read_tflite(file: Path) -> LiteFile:
    """Return the contents of a TFLite file."""
    try:
        return tflite.open(file)
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    except tflite.BrokenFileError as error:
        raise ModelError(f"'{file}': {error}; convert the model again") from error


def inspect_tflite(file: Path) -> TFLiteInspection:
    """Describe a TFLite file: ends, quantization, ops, their types, sizes."""
    content = read_tflite(file)
    main, *others = content.graphs
    by_precision, custom, flex = _kinds(content)
    weights = stored_bytes(content)
    return TFLiteInspection(
        TFLITE,
        file,
        version=content.runtime,
        signatures={
            key: _ends(signature.inputs, signature.outputs)
            for key, signature in content.signatures.items()
        },
        ops=by_count(Counter(op.kind for op in main.ops)),
        function_ops=by_count(Counter(op.kind for g in others for op in g.ops)),
        functions=tuple(
            FunctionInfo(g.name, len(g.ops), len(g.inputs), len(g.outputs))
            for g in others
        ),
        bytes_total=content.bytes_total,
        bytes_constants=sum(weights.values()),
        ends=_ends(
            *({t.name: t for t in each} for each in (main.inputs, main.outputs))
        ),
        precisions=by_precision,
        weights=weights,
        custom_ops=custom,
        flex_ops=flex,
        slow_ops=slow_ops(content),
        metadata=tuple(content.metadata),
        description=content.description,
    )


def _kinds(
    content: LiteFile,
) -> tuple[dict[str, dict[str, int]], dict[str, int], dict[str, int]]:
    """Return ops counted by their types; those that are custom; flex ops."""
    counts: dict[str, Counter[str]] = {}
    custom: Counter[str] = Counter()
    for op in content.ops:
        counts.setdefault(precision_of(op), Counter())[op.kind] += 1
        custom[op.kind] += op.is_custom
    in_order = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    flex = {kind: n for kind, n in custom.items() if kind.startswith(FLEX) and n}
    own = {kind: n for kind, n in custom.items() if n and not kind.startswith(FLEX)}
    return {p: by_count(c) for p, c in in_order}, by_count(own), by_count(flex)


def _ends(
    inputs: Mapping[str, LiteTensor], outputs: Mapping[str, LiteTensor]
) -> SignatureInfo:
    def told(tensors: Mapping[str, LiteTensor]) -> dict[str, TensorInfo]:
        return {
            name: TFLiteTensorInfo(t.dtype, t.shape, t.quantization)
            for name, t in tensors.items()
        }

    return SignatureInfo(told(inputs), told(outputs))
