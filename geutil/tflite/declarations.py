"""TFLite files declared in Python: inputs, constants, ops, outputs, signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite import effects, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.kinds import faults_of_steps, version_of
from geutil.tflite.lookups import GraphLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
)
from geutil.tflite.schema import DTYPES, kind_number, option_fault, type_numbers
from geutil.tflite.shapes import output_shapes, output_types
from geutil.tflite.type_changes import give_ends

Shape = Sequence[int | None]


@checked
def add_graph(file: Contents, name: str) -> LiteGraph:
    """Add an empty subgraph, such as a branch or the body of a loop; return it.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> m.add_graph("body")
        <LiteGraph 'body', 0 ops>
    """
    graph = LiteGraph(name)
    file.graphs.append(graph)
    return graph


def _open_graph(file: Contents, graph: GraphLike) -> LiteGraph:
    """Return a subgraph; of a file without any the main one, which is begun."""
    if graph is None and not file.graphs:
        return add_graph(file, "main")
    return lookups.graph_of(file, graph)


@checked
def add_input(
    file: Contents,
    name: str,
    dtype: str,
    shape: Sequence[int | None] | None,
    *,
    quantization: Quantization | None = None,
    graph: GraphLike = None,
) -> LiteTensor:
    """Add an input to a subgraph; return its tensor.

    Args:
        name: its name.
        dtype: the name of its type, such as "float32".
        shape: its size in each dimension, None for a dynamic one.
        quantization: the scale and zero point of its integers.
        graph: the subgraph, or its name or index; if None, the main one, which is
            created in an empty file.

    Raises:
        TFLiteError: there is no such type or subgraph.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> m.add_input("x", "float32", [None, 4])
        <LiteTensor 'x' float32 [?, 4]>
    """
    check_dtype(dtype)
    own = _open_graph(file, graph)
    tensor = LiteTensor(name, dtype, shape, quantization)
    _check_steps(tensor)
    give_ends(file, own, "inputs", (*own.inputs, tensor))
    return own.add_tensor(tensor)


@checked
def add_constant(
    file: Contents,
    name: str,
    value: Any,
    *,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    graph: GraphLike = None,
) -> LiteTensor:
    """Add a constant to a subgraph; return its tensor.

    Args:
        name: its name.
        value: an array, or numbers; the integers of a quantized constant.
        dtype: the name of its type, such as "int4"; the type of the array if None.
        quantization: the scale and zero point of its integers.

    Raises:
        TFLiteError: TFLite has no such type.

    Example:
        >>> import numpy as np
        >>> from geutil import tflite
        >>> tflite.LiteFile().add_constant("w", np.ones([2, 3], np.float32))
        <LiteTensor 'w' float32 [2, 3]>
    """
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
    _check_steps(tensor)
    return _open_graph(file, graph).add_tensor(tensor)


def _check_steps(tensor: LiteTensor) -> None:
    steps = tensor.quantization
    for fault in faults_of_steps(steps, tensor.dtype, tensor.sizes):
        raise TFLiteError(f"{tensor!r} cannot have {steps}: it then {fault}")


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
    """Return an op that is in no subgraph yet, whose kind and options are checked."""
    if custom_options is None:
        try:
            kind_number(kind)
        except KeyError:
            raise TFLiteError(
                f"TFLite has no op of the kind '{kind}'; give it custom_options= if "
                "it is an op of your own"
            ) from None
    op = LiteOp(kind, inputs, outputs, options, custom_options=custom_options)
    for each in options.items():
        if fault := option_fault(op.table, *each):
            raise TFLiteError(f"{kind} {fault}")
    for option, meaning in _NEEDED.get(kind, {}).items():
        if option not in options:
            raise TFLiteError(
                f"{kind} needs the option '{option}', {meaning}; without it TFLite "
                "takes 0"
            )
    op.version = version_of(op) if version is None else version
    return op


@checked
def add(
    file: Contents,
    kind: str,
    inputs: TensorLike | Iterable[TensorLike | None],
    *,
    name: str | Sequence[str] | None = None,
    shape: Sequence[int | None] | None = None,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    outputs: Sequence[LiteTensor] | None = None,
    version: int | None = None,
    custom_options: bytes | None = None,
    at: int | None = None,
    graph: GraphLike = None,
    **options: Any,
) -> Any:
    """Add an op to a subgraph; return its output tensor, or a tuple of them.

    Args:
        kind: its kind, such as "CONV_2D".
        inputs: the tensors that it reads, or their names; None for omitted ones. A
            single tensor need not be in a list.
        name: the name of its output, or the names of several; its kind if None.
        shape: the shape of its output; inferred by the kind if None.
        dtype: the type of its output; inferred by the kind, or that of the first input,
            if None.
        quantization: the scale and zero point of its integers.
        outputs: new tensors to use as outputs, instead of the four arguments above, for
            outputs that differ in type or shape.
        version: the version of its kernel; the oldest one that supports it if None.
        custom_options: the options of a custom op, as bytes that its kernel reads.
        at: its index in the execution order; the end if None.
        **options: its options by their names in the schema, such as `stride_w=2`,
            `padding="SAME"`; 0 by default.

    Raises:
        TFLiteError: TFLite has no such kind, the kind has no such option, an input
            is not in the subgraph, or the kind has no rule for its shape.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [2, 4])
        >>> m.add("ADD", [x, x], name="y", fused_activation_function="RELU")
        <LiteTensor 'y' float32 [2, 4]>
    """
    own = _open_graph(file, graph)
    listed_inputs = [inputs] if isinstance(inputs, LiteTensor | str) else inputs
    read = [t if t is None else lookups.tensor_of(file, t, own) for t in listed_inputs]
    made = outputs
    if made is None:
        names = name or kind.lower()
        listed = [names] if isinstance(names, str) else names
        made = [LiteTensor(one, "float32", ()) for one in listed]
    op = new_op(kind, read, made, options, version, custom_options)
    for t in made:
        if own.has_tensor(t):
            raise TFLiteError(f"{t!r} is a tensor of {own!r} already")
    if outputs is None:
        _describe(op, shape, dtype, quantization)
        # It can depend on the type of the result.
        op.version = version_of(op) if version is None else version
    own.add_op(op, at)
    return made[0] if len(made) == 1 else tuple(made)


def _describe(
    op: LiteOp,
    shape: Shape | None,
    dtype: str | None,
    quantization: Quantization | None,
) -> None:
    """Set the types and shapes of the tensors that an op makes, by its kind."""
    if dtype is not None:
        check_dtype(dtype)
    first = next((t for t in op.reads), None)
    types, shapes = output_types(op), output_shapes(op)
    for t, own, ruled in zip(op.outputs, types, shapes, strict=True):
        # Most kinds keep the type of the first tensor that they read.
        found = dtype or own or (first and first.dtype)
        if not found:
            raise TFLiteError(f"{op!r}: the type of {t.label} is open; pass dtype=")
        t.dtype = found
        t.quantization = quantization
        if shape is None and ruled is None:
            raise TFLiteError(
                f"{op!r}: no rule of the kind {op.kind} tells the shape of {t.label}; "
                "pass shape="
            )
        t.shape = ruled if shape is None else shape
        _check_steps(t)


@checked
def set_outputs(
    file: Contents, outputs: TensorsLike, *, graph: GraphLike = None
) -> None:
    """Set the outputs of a subgraph; see `expose` to add some.

    In signatures, outputs that stay keep their names; others get their tensors' names.

    Raises:
        TFLiteError: there is no such tensor, or a signature has an output of that name.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.set_outputs("a")
        >>> m.graphs[0].outputs
        (<LiteTensor 'a' float32 [4]>,)
    """
    own = _open_graph(file, graph)
    give_ends(file, own, "outputs", lookups.tensors_of(file, outputs, own))


@checked
def expose(
    file: Contents,
    tensors: TensorsLike | Mapping[str, TensorLike],
    *,
    graph: GraphLike = None,
) -> None:
    """Make tensors additional outputs.

    Args:
        tensors: the tensors, their names, or a mapping from the name of each in
            signatures.

    Raises:
        TFLiteError: a signature has an output of that name, or a tensor is a handle.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.expose("a")
        >>> [t.name for t in m.graphs[0].outputs]
        ['b', 'a']
    """
    own = lookups.graph_of(file, graph)
    named: dict[LiteTensor, str] = {}
    # An op that calls the subgraph takes a fixed number of outputs.
    lookups.check_uncalled(file, own, "another output")
    signatures = lookups.signatures_of(file, own)
    if isinstance(tensors, Mapping):
        for name, item in tensors.items():
            t = lookups.tensor_of(file, item, own)
            if named.setdefault(t, name) != name:
                raise TFLiteError(
                    f"{t!r} cannot be called '{named[t]}' and '{name}'; pass one"
                )
        _check_can_be_named(own, signatures, named)
    else:
        named = {t: t.name for t in lookups.tensors_of(file, tensors, own)}
    for t in named:
        if t.dtype in ("resource", "variant"):
            raise TFLiteError(f"{t!r} is a handle and cannot be an output")
    effects.check_places_are_free(file, "another output")
    new = [t for t in named if t not in own.outputs]
    give_ends(file, own, "outputs", (*own.outputs, *new), named)


def _check_can_be_named(
    graph: LiteGraph,
    signatures: Sequence[LiteSignature],
    named: Mapping[LiteTensor, str],
) -> None:
    """Refuse names that no signature would hold."""
    if named and not signatures:
        raise TFLiteError(
            f"names are those of a signature, and {graph!r} has none; pass the tensors "
            "alone, or call add_signature first"
        )
    for t, name in named.items():
        for s in signatures:
            if t in graph.outputs and s.outputs.get(name) is not t:
                raise TFLiteError(
                    f"{t!r} is an output already, and signature '{s.key}' does not "
                    f"call it '{name}'; use rename"
                )


@checked
def add_signature(
    file: Contents,
    key: str,
    inputs: Mapping[str, TensorLike] | None = None,
    outputs: Mapping[str, TensorLike] | None = None,
    *,
    graph: GraphLike = None,
) -> LiteSignature:
    """Add a signature for a subgraph.

    Args:
        key: its name.
        inputs: a name for each input; those of the tensors if None.
        outputs: a name for each output; those of the tensors if None.

    Raises:
        TFLiteError: a signature of that name exists, or an end has no name, or two.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> _ = m.add_signature("negate", {"image": "x"})
        >>> m
        LiteFile(['negate'], 1 subgraph(s), 1 ops)
    """
    own = lookups.graph_of(file, graph)
    if key in file.signatures:
        raise TFLiteError(f"there is a signature '{key}' already")
    both = []
    for named, ends in ((inputs, own.inputs), (outputs, own.outputs)):
        if named is None:
            named = {t.name: t for t in ends}
        chosen = {n: lookups.tensor_of(file, t, own) for n, t in named.items()}
        if {*chosen.values()} != {*ends} or len(chosen) != len(ends):
            raise TFLiteError(
                f"signature '{key}' has to name each of {[t.name for t in ends]} once, "
                f"not {[t.name for t in chosen.values()]}"
            )
        both.append(chosen)
    file.signatures[key] = LiteSignature(key, own, *both)
    return file.signatures[key]
