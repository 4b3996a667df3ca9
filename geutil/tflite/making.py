"""TFLite files declared in Python: inputs, constants, ops, outputs, signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite import looking
from geutil.tflite.looking import GraphLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
)
from geutil.tflite.schema import DTYPES, kind_number, option_names, type_numbers
from geutil.tflite.shapes import output_shapes, output_types
from geutil.tflite.versions import version_of

Shape = Sequence[int | None]


def add_graph(file: Contents, name: str) -> LiteGraph:
    """Add an empty subgraph to a file; return it."""
    graph = LiteGraph(name)
    file.graphs.append(graph)
    return graph


def _open_graph(file: Contents, graph: GraphLike) -> LiteGraph:
    """Return a subgraph; of a file without any the main one, which is begun."""
    if graph is None and not file.graphs:
        return add_graph(file, "main")
    return looking.graph_of(file, graph)


def add_input(
    file: Contents,
    name: str,
    dtype: str,
    shape: Shape | None,
    quantization: Quantization | None,
    graph: GraphLike,
) -> LiteTensor:
    """Add an input to a subgraph; see `LiteFile.add_input`."""
    check_dtype(dtype)
    own = _open_graph(file, graph)
    tensor = own.add_tensor(LiteTensor(name, dtype, shape, quantization))
    own.inputs = (*own.inputs, tensor)
    return tensor


def add_constant(
    file: Contents,
    name: str,
    value: Any,
    dtype: str | None,
    quantization: Quantization | None,
    graph: GraphLike,
) -> LiteTensor:
    """Add a constant to a subgraph; see `LiteFile.add_constant`."""
    array = np.asarray(value)
    if dtype is None:
        names = {np.dtype(one): word for word, one in DTYPES.items()}
        if array.dtype not in names:
            raise TFLiteError(
                f"constant '{name}': TFLite has no type for {array.dtype} arrays; "
                "convert it, or pass dtype="
            )
        dtype = names[array.dtype]
    check_dtype(dtype)
    tensor = LiteTensor(name, dtype, array.shape, quantization)
    tensor.value = array
    return _open_graph(file, graph).add_tensor(tensor)


def check_dtype(dtype: str) -> None:
    """Refuse a type that the schema does not have."""
    if dtype not in type_numbers():
        raise TFLiteError(f"TFLite has no type '{dtype}'; it has {[*type_numbers()]}")


_NEEDED: Mapping[str, Mapping[str, str]] = {
    "LEAKY_RELU": {"alpha": "the slope below 0"},
    "SOFTMAX": {"beta": "the factor of its logits, which is 1 in most networks"},
}
"""Options by kind that are 0 where they are left out, which no network means."""


def new_op(
    kind: str,
    inputs: Sequence[LiteTensor | None],
    outputs: Sequence[LiteTensor],
    options: Mapping[str, Any],
    version: int | None = None,
    custom_options: bytes | None = None,
) -> LiteOp:
    """Return an op that is in no subgraph yet, whose kind and options are checked.

    Its version is the oldest one that computes it if None.

    Raises:
        TFLiteError: TFLite has no such kind, or the kind no such option.
    """
    if custom_options is None:
        try:
            kind_number(kind)
        except KeyError:
            raise TFLiteError(
                f"TFLite has no op of the kind '{kind}'; give it custom_options= if "
                "it is an op of your own"
            ) from None
    op = LiteOp(kind, inputs, outputs, options, custom_options=custom_options)
    known = [*option_names(op.table).values()] if op.table else []
    for option in options:
        if option not in known:
            raise TFLiteError(
                f"{kind} has no option '{option}'; "
                + (f"its options are {known}" if known else "it has none")
            )
    for option, meaning in _NEEDED.get(kind, {}).items():
        if option not in options:
            raise TFLiteError(
                f"{kind} needs the option '{option}', {meaning}; without it TFLite "
                "takes 0"
            )
    op.version = version_of(op) if version is None else version
    return op


@dataclass(frozen=True)
class Made:
    """The results of an op as far as they are given; the kind tells the rest.

    Attributes:
        name: the name of the tensor, or of each; None for the kind.
        shape: its shape; None for that by the rule of the kind.
        dtype: its type, likewise.
        quantization: the meaning of its integers.
        outputs: the tensors themselves, in the place of all others.
    """

    name: str | Sequence[str] | None
    shape: Shape | None
    dtype: str | None
    quantization: Quantization | None
    outputs: Sequence[LiteTensor] | None


def add(
    file: Contents,
    kind: str,
    inputs: TensorLike | Iterable[TensorLike | None],
    made: Made,
    options: Mapping[str, Any],
    *,
    version: int | None,
    custom_options: bytes | None,
    at: int | None,
    graph: GraphLike,
) -> LiteTensor | tuple[LiteTensor, ...]:
    """Add an op to a subgraph; see `LiteFile.add`."""
    own = _open_graph(file, graph)
    listed_inputs = [inputs] if isinstance(inputs, LiteTensor | str) else inputs
    read = [t if t is None else looking.tensor_of(file, t, own) for t in listed_inputs]
    outputs = made.outputs
    if outputs is None:
        names = made.name or kind.lower()
        listed = [names] if isinstance(names, str) else names
        outputs = [LiteTensor(name, "float32", ()) for name in listed]
    op = new_op(kind, read, outputs, options, version, custom_options)
    for t in outputs:
        if own.has_tensor(t):
            raise TFLiteError(f"{t!r} is a tensor of {own!r} already")
    if made.outputs is None:
        _describe(op, made)
        # It can depend on the type of the result.
        op.version = version_of(op) if version is None else version
    own.add_op(op, at)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _describe(op: LiteOp, made: Made) -> None:
    """Let the tensors that an op makes have the types and shapes of its kind."""
    if made.dtype is not None:
        check_dtype(made.dtype)
    first = next((t for t in op.reads), None)
    types, shapes = output_types(op), output_shapes(op)
    for t, dtype, shape in zip(op.outputs, types, shapes, strict=True):
        found = made.dtype or dtype or (first and first.dtype)
        if not found:
            raise TFLiteError(f"{op!r}: the type of '{t.name}' is open; pass dtype=")
        t.dtype = found
        t.quantization = made.quantization
        if made.shape is None and shape is None:
            raise TFLiteError(
                f"{op!r}: no rule of the kind {op.kind} tells the shape of '{t.name}'; "
                "pass shape="
            )
        t.shape = shape if made.shape is None else made.shape


def set_outputs(file: Contents, outputs: TensorsLike, graph: GraphLike) -> None:
    """Let a subgraph give some tensors; see `LiteFile.set_outputs`."""
    own = _open_graph(file, graph)
    own.outputs = tuple(looking.tensors_of(file, outputs, own))


def add_signature(
    file: Contents,
    key: str,
    inputs: Mapping[str, TensorLike] | None,
    outputs: Mapping[str, TensorLike] | None,
    graph: GraphLike,
) -> LiteSignature:
    """Add a signature to a file; see `LiteFile.add_signature`."""
    own = looking.graph_of(file, graph)
    if key in file.signatures:
        raise TFLiteError(f"there is a signature '{key}' already")
    both = []
    for named, ends in ((inputs, own.inputs), (outputs, own.outputs)):
        if named is None:
            named = {t.name: t for t in ends}
        chosen = {n: looking.tensor_of(file, t, own) for n, t in named.items()}
        if {*chosen.values()} != {*ends} or len(chosen) != len(ends):
            raise TFLiteError(
                f"signature '{key}' has to name each of {[t.name for t in ends]} once, "
                f"not {[t.name for t in chosen.values()]}"
            )
        both.append(chosen)
    file.signatures[key] = LiteSignature(key, own, *both)
    return file.signatures[key]
