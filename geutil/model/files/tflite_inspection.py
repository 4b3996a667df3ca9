"""Inspections of TFLite files: ops, types and sizes, without an interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geutil import tflite
from geutil.errors import ModelError
from geutil.model.files.inspection import (
    FunctionInfo,
    Inspection,
    SignatureInfo,
    TensorInfo,
    counted,
    listed,
    signature_lines,
)
from geutil.sizes import size_text
from geutil.tflite import LiteFile, LiteTensor, Quantization
from geutil.tflite.parts import FLEX
from geutil.tflite.precision import (
    SlowOps,
    by_count,
    precision_of,
    slow_ops,
    stored_bytes,
)

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
        slow_ops: the ops whose kernels are slow on CPUs; see `geutil.tflite.precision`.
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
