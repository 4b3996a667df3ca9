"""The invariants of a TFLite file, written down and checked.

| invariant | meaning |
|---|---|
| `order` | an op runs behind those that it reads from; no two make one tensor |
| `membership` | tensors belong to the subgraph, called subgraphs to the file |
| `values` | all that is read is made, given, a variable, or in the file |
| `kinds` | TFLite has the kind, the kind has the options, the runtime has the version |
| `counts` | an op reads as many tensors as its kernel takes |
| `types` | types are those of the schema, and of results those that the kind makes |
| `shapes` | shapes of results are those that the kind makes of its inputs |
| `buffers` | a constant has as many bytes as its shape and type take |
| `steps` | scales are positive, as many as there are indices; zero points in range |
| `biases` | the scale of a bias is that of the input times that of the weights |
| `scales` | scales are equal, or those that the kernel has, where it rescales nothing |
| `signatures` | a signature names each end of its subgraph once |
| `variables` | variables are not made by ops; what is read of them is set somewhere |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geutil.errors import TFLiteError, VerificationError
from geutil.tflite import effects
from geutil.tflite.arguments import checked
from geutil.tflite.excerpts import of_blocks
from geutil.tflite.kinds import (
    FIXED_SCALE,
    KINDS,
    MANY,
    NO_NUMBERS,
    ONE_SCALE,
    OTHER,
    STEPPED,
    faults_of_steps,
    layer_inputs,
    one_step,
)
from geutil.tflite.parts import Contents, LiteOp, LiteTensor, changed_sizes
from geutil.tflite.schema import (
    DTYPES,
    PACKED_BITS,
    kind_number,
    option_fault,
    type_numbers,
)
from geutil.tflite.shapes import output_shapes, output_types


def _kind(op: LiteOp) -> Iterator[str]:
    if op.is_custom:
        return
    try:
        kind_number(op.kind)
    except KeyError:
        yield "TFLite has no such kind; an op of your own needs custom_options"
        return
    highest = KINDS.get(op.kind, OTHER).version
    if op.version not in range(1, highest + 1):
        yield f"its version is {op.version}, and the runtime has {highest}"
    faults = (option_fault(op.table, *option) for option in op.options.items())
    yield from filter(None, faults)


def _count(op: LiteOp) -> Iterator[str]:
    kind, count = KINDS.get(op.kind, OTHER), len(op.inputs)
    if op.is_custom or kind.most is None:
        return
    if not kind.least <= count <= kind.most:
        to = "" if kind.least == kind.most else f" to {kind.most}"
        takes = f"{kind.least}{to}"
        yield f"reads {count} tensors, and its kernel takes {takes}"
    needed = count if kind.most == MANY else kind.least
    for place in (i for i, t in enumerate(op.inputs[:needed]) if t is None):
        yield f"leaves out input {place}, which its kernel needs"
    if op.kind in ("IF", "WHILE"):
        yield from _calls(op)


def _calls(op: LiteOp) -> Iterator[str]:
    """Yield the ends of called subgraphs that do not fit the tensors of an op."""
    condition = op.inputs[0] if op.kind == "IF" and op.inputs else None
    if condition is not None and condition.dtype != "bool":
        yield f"goes by {condition!r}, which is no bool"
    for handed, graph, word in effects.calls(op):
        ends = handed, getattr(graph, word)
        own, its = ([t.dtype for t in tensors if t] for tensors in ends)
        if own != its:
            yield f"has {own} for the {word} {its} of {graph!r}"


def _types(op: LiteOp) -> Iterator[str]:
    """Yield the types of an op that its kernel does not make or take."""
    for t, dtype in zip(op.outputs, output_types(op), strict=False):
        if dtype is not None and t.dtype != dtype:
            yield f"makes {dtype}, and {t!r} is {t.dtype}"
    kind = KINDS.get(op.kind, OTHER)
    if op.is_custom or kind.data >= len(op.inputs):
        return
    data = op.inputs[kind.data]
    if data is not None and kind.types and data.dtype not in kind.types:
        yield (
            f"its kernel computes in {', '.join(kind.types)}, and {data!r} is "
            f"{data.dtype}; put a CAST, QUANTIZE or DEQUANTIZE before it"
        )
    for one in op.inputs[kind.data :] if kind.is_alike else ():
        if one is not None and data is not None and one.dtype != data.dtype:
            yield f"reads {data!r} and {one!r}, and its kernel takes one type"
    if kind.most is not None and op.kind not in effects.TAKE_HANDLES:
        for t in op.reads:
            # A handle may be an argument that the op passes on to its subgraph.
            if t.dtype in ("resource", "variant") and not op.subgraphs:
                yield f"cannot read {t!r}, which is a handle"


def _shapes(op: LiteOp) -> Iterator[str]:
    try:
        shapes = output_shapes(op)
    except TFLiteError as error:
        yield str(error)
        return
    for t, shape in zip(op.outputs, shapes, strict=False):
        stated = t.shape
        if shape is None or stated is None or not (stated or t.record.hasRank):
            continue
        if len(shape) != len(stated) or changed_sizes(shape, stated):
            yield f"makes {[*shape]}, and {t!r} is {[*stated]}"


_ROUNDING = 1e-6
"""A product of two float32 scales is rounded to 2^-23 of itself: two of them differ
by 2.4e-7."""


def _bias(op: LiteOp) -> Iterator[str]:
    """Yield the faults of a bias: its type, its length, its scale."""
    x, weights, bias = layer_inputs(op)
    if x is None or weights is None:
        return
    for t in (x, weights, *op.outputs) if x.dtype in _NARROW else ():
        if t.dtype in _NARROW and t.quantization is None:
            yield f"computes in integers, and {t!r} has no steps"
    if bias is None:
        return
    wide = ("int32",) if x.dtype in _NARROW else ("float32",)
    if bias.dtype not in (("int32", "int64") if x.dtype == "int16" else wide):
        yield f"its bias {bias!r} is {bias.dtype}, and is {wide[0]} for {x.dtype}"
        return
    # These kinds have their output channels last, and the others first.
    last = op.kind.startswith(("DEPTHWISE", "CONV_3D"))
    channels = (weights.sizes or (0,))[-1 if last else 0]
    if math.prod(bias.sizes) != channels:
        yield f"its bias {bias!r} has {math.prod(bias.sizes)} values for {channels}"
    steps = [t.quantization for t in (x, weights, bias)]
    if wide == ("float32",) or any(s is None or s.block for s in steps):
        return
    of_x, of_weights, of_bias = (np.asarray(s.scales) for s in steps if s)
    if of_x.size != 1 or of_bias.size not in (1, of_weights.size):
        counts = f"{of_x.size}, {of_weights.size} and {of_bias.size}"
        yield f"input, weights and bias have {counts} scales"
    elif not np.allclose(of_bias, of_x * of_weights, rtol=_ROUNDING, atol=0):
        product = (of_x * of_weights).flat[0]
        fault = f"its bias has the scale {of_bias.flat[0]:.6g}, input and weights"
        yield f"{fault} {product:.6g}"


_NARROW = ("int8", "int16", "uint8")


def _scales(op: LiteOp) -> Iterator[str]:
    if op.is_custom:
        return
    for t in op.outputs:
        fixed = FIXED_SCALE.get((op.kind, t.dtype))
        if fixed is not None and one_step(t) is not None and not _same(t, *fixed):
            yield f"its kernel gives scale {fixed[0]:.6g}, zero {fixed[1]}"
    if op.kind not in ONE_SCALE:
        return
    ends = [t for t in (*op.inputs, *op.outputs) if t and t.dtype in STEPPED]
    stepped = [t for t in ends if one_step(t) is not None]
    for t in stepped[1:]:
        scale, zero = one_step(stepped[0]) or (0.0, 0)
        if not _same(t, scale, zero):
            yield f"rescales nothing, and {stepped[0]!r} and {t!r} differ"


def _same(tensor: LiteTensor, scale: float, zero: int) -> bool:
    own = one_step(tensor)
    return own is not None and own[1] == zero and abs(own[0] - scale) <= 1e-6 * scale


OP_CHECKS: Mapping[str, Callable[[LiteOp], Iterator[str]]] = {
    "kinds": _kind,
    "counts": _count,
    "types": _types,
    "shapes": _shapes,
    "biases": _bias,
    "scales": _scales,
}
"""The checks by the invariants of `verify`."""


def faults(op: LiteOp) -> list[str]:
    """Return why the tensors of an op do not fit its kernel."""
    return [fault for check in OP_CHECKS.values() for fault in check(op)]


def check_fits(op: LiteOp, reads: Sequence[LiteTensor | None] | None = None) -> None:
    """Refuse an op whose tensors do not fit its kernel."""
    if reads is None:
        new = faults(op)
    else:
        edited = op.copied({})
        edited.inputs = reads
        before = faults(op)
        new = [fault for fault in faults(edited) if fault not in before]
    if new:
        raise TFLiteError(f"{op!r}: {new[0]}")


# Violations that a message lists; the rest is counted.
_SHOWN = 10


@dataclass(frozen=True)
class Violation:
    """One breach of an invariant.

    Attributes:
        invariant: its name in the table of this module.
        where: the op, tensor or signature that breaks it, and its subgraph.
        reason: the fault, in a sentence.

    Example:
        >>> from geutil.tflite.verify import Violation
        >>> print(Violation("order", "<LiteOp ADD -> 'y'>", "reads 'x' too early"))
        [order] <LiteOp ADD -> 'y'>: reads 'x' too early
    """

    invariant: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"[{self.invariant}] {self.where}: {self.reason}"


Check = Iterator[tuple[object, str]]
"""Pairs of an op, tensor, subgraph or signature, and its fault."""


@checked
def verify(file: Contents) -> None:
    """Check that the file keeps every invariant of `geutil.tflite.verify`.

    Raises:
        VerificationError: with a line and a `Violation` for each breach.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.verify()
    """
    violations = tuple(find_violations(file))
    if violations:
        lines = [str(violation) for violation in violations[:_SHOWN]]
        if len(violations) > _SHOWN:
            lines.append(f"and {len(violations) - _SHOWN} more")
        count = f"{len(violations)} invariant{'s' * (len(violations) > 1)} broken"
        raise VerificationError("\n  ".join([f"{count}:", *lines]), violations)


def find_violations(file: Contents) -> list[Violation]:
    """Return every breach of an invariant, grouped by invariant, in their order.

    Cost: linear in ops, tensors and scales.

    Example:
        >>> from geutil import tflite
        >>> from geutil.tflite.verify import find_violations
        >>> m = tflite.LiteFile()
        >>> m.set_outputs([m.add_input("x", "float32", [2])])
        >>> find_violations(m)
        []
    """
    return [
        Violation(name, repr(where), reason)
        for name, check in CHECKS.items()
        for where, reason in check(file)
    ]


def _check_order(file: Contents) -> Check:
    for graph in file.graphs:
        made = {t for op in graph.ops for t in op.outputs}
        ready: set[LiteTensor] = set()
        for op in graph.ops:
            for t in op.inputs:
                if t in made and t not in ready:
                    yield op, f"reads {t!r}, which is made only behind it"
            for t in op.outputs:
                if t in ready:
                    yield op, f"makes {t!r}, which another op makes, too"
                ready.add(t)
        for t in graph.inputs:
            if t in made:
                yield t, "is an input, and an op makes it"


def _check_membership(file: Contents) -> Check:
    """Yield tensors, buffers and callees that the file does not hold."""
    graphs = {*file.graphs}
    for graph in file.graphs:
        for t in (*graph.inputs, *graph.outputs):
            if not graph.has_tensor(t):
                yield graph, f"its end {t!r} is no tensor of it"
        for op in graph.ops:
            if op.graph is not graph:
                yield op, f"is listed in {graph!r}, and belongs to {op.graph!r}"
            for one in (*op.inputs, *op.outputs, *op.intermediates):
                if one is not None and not graph.has_tensor(one):
                    yield op, f"{one!r} is no tensor of its subgraph"
            for callee in op.subgraphs:
                if callee not in graphs:
                    yield op, f"calls {callee!r}, which is not in the file"
        for t in graph.tensors:
            for scales in of_blocks(t):
                if not graph.has_tensor(scales):
                    yield t, f"its scales {scales!r} are no tensor of its subgraph"


def _check_values(file: Contents) -> Check:
    for graph in file.graphs:
        given = {*graph.inputs}
        read = [t for op in graph.ops for t in op.reads]
        for t in dict.fromkeys((*read, *graph.outputs)):
            known = t.makers or t in given or t.is_variable or t.buffer.size
            outside = getattr(t.record, "externalBuffer", 0) or t.dtype in NO_NUMBERS
            if not (known or outside or 0 in t.sizes):
                yield t, "is read, and nothing makes it or gives it"


def _check_types(file: Contents) -> Check:
    unknown = (t for t in file.tensors if t.dtype not in type_numbers())
    yield from ((t, f"TFLite has no type '{t.dtype}'") for t in unknown)
    yield from _of_ops("types")(file)


def _check_steps(file: Contents) -> Check:
    for t in file.tensors:
        faults = faults_of_steps(t.quantization, t.dtype, t.sizes)
        yield from ((t, fault) for fault in faults)


def _of_ops(invariant: str) -> Callable[[Contents], Check]:
    """Return the check of an invariant that each op keeps for itself."""
    check = OP_CHECKS[invariant]
    return lambda file: ((op, fault) for op in file.ops for fault in check(op))


def _check_buffers(file: Contents) -> Check:
    for t in file.tensors:
        size = t.buffer.size
        bits = PACKED_BITS.get(t.dtype)
        if bits is None and t.dtype in DTYPES:
            bits = 8 * np.dtype(DTYPES[t.dtype]).itemsize
        if not size or bits is None or t.is_sparse:
            continue
        needed = -(-int(np.prod(t.sizes, dtype=np.int64)) * bits // 8)
        if size != needed:
            yield t, f"its values take {needed:,} bytes, and the file has {size:,}"


def _check_signatures(file: Contents) -> Check:
    for key, signature in file.signatures.items():
        where = f"signature {key}"
        if signature.key != key:
            yield where, f"calls itself '{signature.key}'"
        if signature.graph not in file.graphs:
            yield where, "its subgraph is not in the file"
            continue
        for field in ("inputs", "outputs"):
            ends = {*getattr(signature.graph, field)}
            named = {*getattr(signature, field).values()}
            if not named <= ends:
                yield where, f"names {field} that its subgraph does not have"
            elif named != ends:
                yield where, f"leaves out {field} of its subgraph"


def _check_variables(file: Contents) -> Check:
    """Yield variables with values or makers, and reads of handles that nothing sets."""
    written: set[effects.Resource] = set()
    for op in file.ops:
        if op.kind in effects.WRITERS:
            written |= effects.resources(op)
        for t in op.outputs:
            if t.is_variable:
                yield op, f"makes {t!r}, which is a variable"
    for t in file.tensors:
        if t.is_variable and t.buffer.size:
            yield t, "is a variable, and has values in the file, which none begins with"
    for op in file.ops:
        if op.kind == "READ_VARIABLE":
            about = {one for one in effects.resources(op) if one[0] == "VAR_HANDLE"}
            # A handle that comes as an argument has no name here: its caller sets it.
            if about and not about & written:
                yield op, "reads a variable that no op of the file sets"


CHECKS: Mapping[str, Callable[[Contents], Check]] = {
    "order": _check_order,
    "membership": _check_membership,
    "values": _check_values,
    "kinds": _of_ops("kinds"),
    "counts": _of_ops("counts"),
    "types": _check_types,
    "shapes": _of_ops("shapes"),
    "buffers": _check_buffers,
    "steps": _check_steps,
    "biases": _of_ops("biases"),
    "scales": _of_ops("scales"),
    "signatures": _check_signatures,
    "variables": _check_variables,
}
