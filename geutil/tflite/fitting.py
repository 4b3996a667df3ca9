"""Ops and their tensors: whether these fit the kernel, by the kind of the op.

Each check yields a sentence for each fault of one op. `verify` runs them on a file;
edits run them on the ops that they make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite import state
from geutil.tflite.kinds import KINDS, MANY, OTHER
from geutil.tflite.parts import LiteOp, LiteTensor
from geutil.tflite.schema import kind_number, option_fault
from geutil.tflite.shapes import output_shapes, output_types
from geutil.tflite.steps import BIASED, FIXED_SCALE, ONE_SCALE, STEPPED, one_step


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
        takes = (
            f"{kind.least}"
            if kind.least == kind.most
            else f"{kind.least} to {kind.most}"
        )
        yield f"reads {count} tensors, and its kernel takes {takes}"
    needed = count if kind.most == MANY else kind.least
    for place in (i for i, t in enumerate(op.inputs[:needed]) if t is None):
        yield f"leaves out input {place}, which its kernel needs"
    if op.kind in ("IF", "WHILE"):
        yield from _calls(op)


def _calls(op: LiteOp) -> Iterator[str]:
    """Yield the ends of called subgraphs that do not fit the tensors of an op."""
    handed = op.inputs[1:] if op.kind == "IF" else op.inputs
    condition = op.inputs[0] if op.kind == "IF" else None
    if condition is not None and condition.dtype != "bool":
        yield f"goes by {condition!r}, which is no bool"
    for place, graph in enumerate(op.subgraphs):
        ends = [(handed, graph.inputs, "inputs")]
        # The condition of a loop gives a truth value, and not the tensors of the loop.
        if op.kind == "IF" or place:
            ends.append((op.outputs, graph.outputs, "outputs"))
        for own, its, word in ends:
            types = [[t.dtype for t in tensors if t] for tensors in (own, its)]
            if types[0] != types[1]:
                yield f"has {types[0]} for the {word} {types[1]} of {graph!r}"


def _types(op: LiteOp) -> Iterator[str]:
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
    if kind.most is not None and op.kind not in state.TAKE_HANDLES:
        for t in op.reads:
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
        pairs = zip(shape, stated, strict=False)
        if len(shape) != len(stated) or any(
            a != b for a, b in pairs if a is not None and b is not None
        ):
            yield f"makes {[*shape]}, and {t!r} is {[*stated]}"


_ROUNDING = 1e-6
"""A product of two float32 scales is rounded to 2^-23 of itself: two of them differ
by 2.4e-7."""


def _bias(op: LiteOp) -> Iterator[str]:
    places = BIASED.get(op.kind)
    if op.is_custom or places is None or places[1] >= len(op.inputs):
        return
    x, weights, bias = (*op.inputs, None)[places[0]], op.inputs[places[1]], None
    if places[2] < len(op.inputs):
        bias = op.inputs[places[2]]
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
