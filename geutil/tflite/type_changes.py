"""Types of a file changed: those of its inputs and outputs, or all to float.

A QUANTIZE op behind an input, or in front of an output, changes the type and not the
value: an unsigned integer is the signed one plus 128, in the same steps. Floats are
rounded behind an input, and made of integers in front of an output by a DEQUANTIZE op.
Ops of these kinds that a file has already at an end are taken away first.

Where all becomes float, weights and biases become the numbers that their integers stand
for, kernels compute in float32 with the activations that they have fused, and ops that
only change types go. A change of steps that cuts off all below 0 becomes the Relu that
it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from geutil.errors import TFLiteError, Words
from geutil.tflite import effects, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.excerpts import drop_unused
from geutil.tflite.kinds import CONVERSIONS, STEPPED, WIDE, limits, one_step, version_of
from geutil.tflite.lookups import GraphLike
from geutil.tflite.numbers import Stored, numbers
from geutil.tflite.parts import (
    Buffer,
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
)

Choices = Mapping[str, Sequence[str]]
Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""
CHOICES: Choices = {
    "int8": ("int8", "uint8", "int16", "float32"),
    "int16": ("int16", "int8", "float32"),
    "uint8": ("uint8", "int8", "float32"),
    "float32": ("float32",),
}
"""By the type that a file's kernels read or make, the types that an end can have.

The kernel of QUANTIZE has no way from uint8 to int16, or back: kernels/quantize.cc.
"""


@dataclass
class End:
    """An input or output of a subgraph whose type is to change."""

    what: str
    name: str
    wanted: str
    is_named: bool
    tensor: LiteTensor
    key: str = ""
    steps: Quantization | None = None


def set_types(
    file: Contents, graph: LiteGraph, ends: Sequence[End], choices: Choices = CHOICES
) -> None:
    """Set the types of inputs and outputs of a subgraph."""
    edit = _Ends(file, graph)
    if ends:
        lookups.check_uncalled(file, graph, "another type")
    planned = [(end, edit.inner(end)) for end in ends]
    needed = [(end, inner) for end, inner in planned if _changes(end, inner, choices)]
    # Inputs come before outputs.
    for end, inner in sorted(needed, key=lambda pair: pair[0].what):
        edit.change(end, inner)
    edit.finish()


def _changes(end: End, inner: LiteTensor, choices: Choices) -> bool:
    """Return whether an end has another type than it is to have."""
    kind, is_stepped = inner.dtype, inner.quantization is not None
    is_float = kind == "float32"
    known: Sequence[str] = choices.get(kind, ()) if is_stepped or is_float else ()
    if end.steps is not None:
        known = ("int8", "uint8", "int16")
        _check_steps(end, end.steps)
    if end.wanted in known:
        same_steps = end.steps is None or end.tensor.quantization == end.steps
        return end.wanted != end.tensor.dtype or not same_steps
    # One type for all ends leaves those alone that it does not concern.
    if not known and not end.is_named:
        return False
    if is_stepped and not is_float:
        reason = f"is stored in {kind}, and can be {' or '.join(known)}"
        remedy = "pass one of these, or quantize by another scheme"
    elif known:
        reason = "is left in float"
        others = Words("by a mapping from the names of others to types")
        remedy = f"leave it out, {others}"
    else:
        reason = f"holds {kind}, which stand for themselves"
        remedy = "leave it out"
    raise TFLiteError(
        f"{end.what} '{end.name}' of the file cannot be {end.wanted}: it {reason}",
        remedy=remedy,
    )


def _check_steps(end: End, steps: Quantization) -> None:
    """Refuse steps that no integers of the wanted type have."""
    if end.wanted == "float32":
        raise TFLiteError(
            f"{end.what} '{end.name}' is to be float32, which has no steps"
        )
    low, high = (0, 0) if end.wanted == "int16" else limits(end.wanted)
    one = len(steps.scales) == len(steps.zero_points) == 1
    if not (
        one and 0 < steps.scales[0] < math.inf and low <= steps.zero_points[0] <= high
    ):
        raise TFLiteError(
            f"{end.what} '{end.name}' cannot have {steps} in {end.wanted}: it needs "
            f"one positive scale, and a zero point from {low} to {high}"
        )


class _Ends:
    """The ends of a subgraph, which are changed."""

    def __init__(self, file: Contents, graph: LiteGraph) -> None:
        self._file, self._graph = file, graph
        # By tensor and type, the tensor that an output is changed to.
        self._given: dict[tuple[LiteTensor, str], LiteTensor] = {}
        self._changed: dict[LiteTensor, None] = {}
        self._added: tuple[list[LiteOp], list[LiteOp]] = [], []
        self._removed: set[LiteOp] = set()
        self._inputs, self._outputs = list(graph.inputs), list(graph.outputs)

    def inner(self, end: End) -> LiteTensor:
        """Return the tensor of integers that an end was changed from, else its own."""
        tensor = end.tensor
        op = self._conversion(end)
        if op is None:
            return tensor
        inner = op.outputs[0] if end.what == "input" else op.inputs[0]
        return tensor if inner is None else inner

    def _conversion(self, end: End) -> LiteOp | None:
        """Return the op that changes the type of an end, and nothing else reads."""
        tensor, graph = end.tensor, self._graph
        op = tensor.producer
        if end.what == "input":
            readers = tensor.consumers
            op = readers[0] if len(readers) == 1 else None
            if op is None or op.kind != "QUANTIZE" or tensor in graph.outputs:
                return None
            return op if _changes_type_alone(tensor, op.outputs[0]) else None
        if op is None or tensor.readers or op.kind not in CONVERSIONS:
            return None
        source = op.inputs[0]
        if source is None or not _changes_type_alone(tensor, source):
            return None
        # Weights behind a DEQUANTIZE are no integers of kernels.
        return op if source.producer is not None else None

    def change(self, end: End, inner: LiteTensor) -> None:
        """Change the type of an end, ahead of all ops or behind them."""
        op = self._conversion(end)
        if op is not None:
            self._removed.add(op)
        is_input, key = end.what == "input", (inner, end.wanted)
        # Outputs of one tensor in one type are changed once.
        new = None if is_input else self._given.get(key)
        if new is None:
            new = self._end(end, inner)
            if not is_input:
                self._given[key] = new
            if new is not inner and is_input:
                self._added[0].insert(0, conversion(new, inner))
            elif new is not inner:
                self._added[1].append(conversion(inner, new))
        ends = self._inputs if is_input else self._outputs
        ends[ends.index(end.tensor)] = new
        for signature in lookups.signatures_of(self._file, self._graph):
            named = getattr(signature, f"{end.what}s")
            for name, tensor in named.items():
                if tensor is end.tensor and end.key in ("", name):
                    named[name] = new

    def _end(self, end: End, inner: LiteTensor) -> LiteTensor:
        """Return the new tensor of an end, with the name of the one before."""
        tensor = end.tensor
        if end.wanted == inner.dtype and end.steps in (None, inner.quantization):
            if inner not in (*self._graph.inputs, *self._graph.outputs):
                inner.name = tensor.name
            return inner
        new = inner.copied()
        new.name, new.dtype, new.is_variable = tensor.name, end.wanted, False
        new.quantization = end.steps or steps_of_type(inner, end.wanted)
        self._changed[inner] = None
        return new

    def finish(self) -> None:
        """Apply the edit to the subgraph."""
        graph = self._graph
        first, last = self._added
        ops = [*first, *(op for op in graph.ops if op not in self._removed), *last]
        old = {*graph.inputs, *graph.outputs}
        graph.set_ops(ops)
        graph.inputs, graph.outputs = tuple(self._inputs), tuple(self._outputs)
        new = {*graph.inputs, *graph.outputs}
        for tensor in new:
            graph.add_tensor(tensor)
        gone = [t for t in old - new if not t.makers and not t.readers]
        graph.drop_tensors(gone)
        for tensor in self._changed:
            if tensor not in new and tensor.name in {t.name for t in new}:
                # The converter names tensors that are no ends any more so.
                tensor.name = re.sub(r"^[^;:]*", r"\g<0>1", tensor.name)


def _changes_type_alone(end: LiteTensor, inner: LiteTensor) -> bool:
    """Return whether an end has the numbers of a tensor, in another type."""
    if inner.dtype == "float32" or inner.quantization is None:
        return False
    if end.dtype == "float32":
        return True
    known = one_step(end), one_step(inner)
    if end.dtype == inner.dtype or None in known:
        return False
    return steps_of_type(inner, end.dtype) == end.quantization


def steps_of_type(tensor: LiteTensor, dtype: str) -> Quantization | None:
    """Return steps in which another type stands for the numbers of a tensor.

    Integers of 8 bits have the same steps, and a zero point that is 128 away; those of
    16 bits reach as far, around 0.
    """
    steps = tensor.quantization
    if steps is None or not dtype.startswith(("int", "uint")):
        return None
    (scale, zero), (low, high) = (
        (steps.scales[0], steps.zero_points[0]),
        limits(tensor.dtype),
    )
    least, most = limits(dtype)
    # Between types of one width the zero point moves, and the scale stays.
    if most - least == high - low:
        return replace(steps, zero_points=(zero + least - low,))
    # TFLite's int16 is symmetric: its zero point is 0.
    if dtype == "int16":
        reach = max(abs(low - zero), abs(high - zero)) * scale
        return Quantization((reach / most,), (0,))
    span = (high - low) * scale / (most - least)
    return Quantization((span,), (round(least - (low - zero) * scale / span),))


def set_end(
    file: Contents, graph: LiteGraph, tensor: LiteTensor, new: LiteTensor
) -> None:
    """Replace an input or output of a subgraph by another tensor."""
    for field in ("inputs", "outputs"):
        move_ends(file, graph, field, {tensor: new})


def move_ends(
    file: Contents, graph: LiteGraph, field: str, moves: Mapping[LiteTensor, LiteTensor]
) -> None:
    """Replace ends of a subgraph, and those of its signatures."""
    setattr(graph, field, tuple(moves.get(t, t) for t in getattr(graph, field)))
    for signature in lookups.signatures_of(file, graph):
        named = getattr(signature, field)
        named.update((name, moves[t]) for name, t in [*named.items()] if t in moves)


def give_ends(
    file: Contents,
    graph: LiteGraph,
    field: str,
    tensors: Sequence[LiteTensor],
    names: Mapping[LiteTensor, str] = MappingProxyType({}),
) -> None:
    """Set the inputs or outputs of a subgraph, and name them in its signatures."""
    named: list[tuple[LiteSignature, dict[str, LiteTensor]]] = []
    for signature in lookups.signatures_of(file, graph):
        old = getattr(signature, field)
        ends = {name: t for name, t in old.items() if t in tensors}
        known = {*ends.values()}
        for t in dict.fromkeys(t for t in tensors if t not in known):
            name = names.get(t, t.name)
            if not name or ends.setdefault(name, t) is not t:
                because = (
                    f"has an {field[:-1]} '{name}' already" if name else "names ends"
                )
                raise TFLiteError(
                    f"signature '{signature.key}' {because}",
                    remedy=f"{Words('pass a mapping from names to tensors')}, or give "
                    f"{t!r} another name",
                )
        named.append((signature, ends))
    # Metadata describe the ends of the main subgraph alone.
    if graph is file.graphs[0] and (*tensors,) != getattr(graph, field):
        effects.leave_description_out(file)
    setattr(graph, field, (*tensors,))
    for signature, ends in named:
        setattr(signature, field, ends)


def conversion(source: LiteTensor, made: LiteTensor) -> LiteOp:
    """Return the op that makes a tensor of the same numbers of another one."""
    kind = "DEQUANTIZE" if made.dtype == "float32" else "QUANTIZE"
    op = LiteOp(kind, [source], [made])
    op.version = version_of(op)
    return op


def _ends_of(
    file: Contents,
    graph: LiteGraph,
    what: str,
    types: Mapping[str, str] | str | None,
    steps: Mapping[str, Quantization],
) -> list[End]:
    """Return the ends of a subgraph that are to change, and the types wanted."""
    names = lookups.named_ends(file, graph, f"{what}s")
    has_keys = bool(lookups.signatures_of(file, graph))
    wanted = dict.fromkeys(names, types) if isinstance(types, str) else types or {}
    found: list[End] = []
    for name, dtype in wanted.items():
        if dtype not in _NAMES:
            raise TFLiteError(
                f"there is no type '{dtype}' of {what}s; the types are "
                f"{', '.join(_NAMES)}"
            )
        if name not in names:
            raise TFLiteError(
                f"the file has no {what} '{name}' to give a type; its {what}s are "
                f"{', '.join(names)}"
            )
        is_named, key = not isinstance(types, str), name if has_keys else ""
        found.append(
            End(what, name, dtype, is_named, names[name], key, steps.get(name))
        )
    return found


_NAMES = ("int8", "uint8", "int16", "float32")


@checked
def set_io_type(
    file: Contents,
    inputs: Types = None,
    outputs: Types = None,
    *,
    steps: Mapping[str, Quantization] | None = None,
    graph: GraphLike = None,
) -> None:
    """Set the types of inputs and outputs: "int8", "uint8", "int16" or "float32".

    Kernels are not changed: a QUANTIZE or DEQUANTIZE op at the input or output converts
    the type; one that is no longer needed is removed.

    Args:
        inputs: the type of all quantized inputs, or a mapping from names to types.
            Names are those of the signature, if the subgraph has one.
        outputs: the same for outputs.
        steps: by name, the scales and zero points of float inputs and outputs that are
            to become integers.

    Raises:
        TFLiteError: there is no such end or type, or it cannot have that type. The file
            is unchanged.

    Example:
        >>> from geutil import tflite
        >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
        >>> x = m.add_input("x", "int8", [4], quantization=steps)
        >>> m.set_outputs([m.add("ABS", [x], name="y", quantization=steps)])
        >>> m.set_io_type("float32", "uint8")
        >>> [op.kind for op in m.ops], [t.dtype for t in m.graphs[0].outputs]
        (['QUANTIZE', 'ABS', 'QUANTIZE'], ['uint8'])
    """
    found = lookups.graph_of(file, graph)
    known = dict(steps or {})
    taken = _ends_of(file, found, "input", inputs, known)
    given = _ends_of(file, found, "output", outputs, known)
    idle = [*{*known} - {end.name for end in (*taken, *given)}]
    if idle:
        raise TFLiteError(
            f"there are steps for {sorted(idle)}, whose types are not to change"
        )
    set_types(file, found, [*taken, *given])


_CHANGES = frozenset({"DENSIFY", *CONVERSIONS})
"""Kinds that make the same numbers in another type."""
_RAW = frozenset({"BITCAST", "CAST"})
"""Kinds that read integers themselves, and not the numbers that they stand for."""


@checked
def dequantize(file: Contents) -> Stored:
    """Convert integers and float16 weights to float32: weights, kernels and ends.

    Fused activations stay; QUANTIZE and DEQUANTIZE ops are removed.

    Returns:
        A report of the tensors that changed.

    Raises:
        TFLiteError: a custom op reads or returns integers. The file is unchanged.

    Cost: linear in ops and weights, which are four times as large.

    Example:
        >>> from geutil import tflite
        >>> m, steps = tflite.LiteFile(), tflite.Quantization((1 / 128,))
        >>> x = m.add_input("x", "int8", [4], quantization=steps)
        >>> y = m.add("TANH", [x], name="y", quantization=steps, version=2)
        >>> m.set_outputs([y])
        >>> print(m.dequantize())
        2 tensors changed; none clipped
        >>> m.tensor("y"), m.graphs[0].ops[0].version
        (<LiteTensor 'y' float32 [4]>, 1)
    """
    effects.check_places_are_free(file, "dequantizing")
    changed = [
        t for t in file.tensors if _stands_for_numbers(t) or t.dtype == "float16"
    ]
    concerned = set(changed)
    for op in file.ops:
        ends = [t for t in (*op.inputs, *op.outputs) if t in concerned]
        if ends and op.is_custom:
            raise TFLiteError(
                f"custom op {op!r} takes or makes {ends[0]}, and nothing says whether "
                "it can compute in float32; cut the file around it"
            )
        if op.kind in _RAW and any(_stands_for_numbers(t) for t in ends):
            raise TFLiteError(
                f"{op!r} reads the integers of {ends[0].label} themselves; replace it "
                "by a DEQUANTIZE"
            )
    # These cut off values below 0, and leaving them out would change results.
    cutting = [op for op in file.ops if _cuts_at_zero(op)]
    dropped = [
        op for op in file.ops if _is_dropped(op, concerned) and op not in cutting
    ]
    # Without its DENSIFY, a sparse tensor has to be stored in full.
    sparse = [t for op in dropped for t in op.inputs if t is not None and t.is_sparse]
    whole = list(dict.fromkeys([*changed, *sparse]))
    # Numbers are read while tensors have their types and steps.
    values = {
        t: numbers(t).astype(np.float32)
        for t in whole
        if t.buffer.size and not t.makers
    }
    touched = {op for t in changed for op in (*t.makers, *t.readers)}
    for tensor in whole:
        tensor.dtype, tensor.quantization = "float32", None
        if tensor in values:
            tensor.value = values[tensor]
        elif not tensor.buffer.size:
            tensor.buffer = Buffer(tensor.buffer.data)
    for op in cutting:
        op.kind, op.table, op.options = "RELU", None, {}
    for graph in file.graphs:
        _drop(file, graph, dropped)
    for op in file.ops:
        if op in touched:
            _become_float_op(op)
    return Stored({}, tuple(whole))


def _stands_for_numbers(tensor: LiteTensor) -> bool:
    kinds = (*STEPPED, *WIDE)
    return tensor.quantization is not None and tensor.dtype in kinds


def _is_dropped(op: LiteOp, changed: set[LiteTensor]) -> bool:
    """Return whether an op forwards its input in float32."""
    source = op.inputs[0] if op.inputs else None
    if op.is_custom or op.kind not in _CHANGES or source is None:
        return False
    made = op.outputs[0]
    return all(t in changed or t.dtype == "float32" for t in (source, made))


def _cuts_at_zero(op: LiteOp) -> bool:
    """Return whether a change of steps is a Relu, too: its new range begins at 0."""
    if op.kind != "QUANTIZE" or op.is_custom or op.inputs[0] is None:
        return False
    least = []
    for tensor in (op.inputs[0], op.outputs[0]):
        step = one_step(tensor)
        if step is None or tensor.dtype not in STEPPED:
            return False
        least.append((limits(tensor.dtype)[0] - step[1]) * step[0])
    return least[0] < 0 == least[1]


def _become_float_op(op: LiteOp) -> None:
    """Set the version and the options of an op's float kernel."""
    op.version = version_of(op)
    for name, value in (
        ("asymmetric_quantize_inputs", False),
        ("quantized_bias_type", "FLOAT32"),
    ):
        if name in op.options:
            op.options[name] = value
    # They describe what an integer kernel computes on the way.
    op.intermediates = ()


def _drop(file: Contents, graph: LiteGraph, ops: Iterable[LiteOp]) -> None:
    """Remove ops that forward their input, and let their readers read that."""
    replaced: dict[LiteTensor, LiteTensor] = {}
    gone = set(ops)
    for op in graph.ops:
        source = op.inputs[0] if op.inputs else None
        if op in gone and source is not None:
            # Ops come in their order, so the source has its replacement already.
            replaced[op.outputs[0]] = replaced.get(source, source)
    kept = [op for op in graph.ops if op not in gone]
    graph.set_ops(kept)
    for op in kept:
        op.inputs = [t and replaced.get(t, t) for t in op.inputs]
    ends = {*graph.inputs, *graph.outputs}
    for made, source in replaced.items():
        if made in ends and source not in ends:
            source.name = made.name
            ends.add(source)
    move_ends(file, graph, "outputs", replaced)
    drop_unused(file, graph, graph.tensors)
