"""The invariants of a TFLite file, written down and checked.

| invariant | meaning |
|---|---|
| `order` | an op runs behind those that it reads from; no two make one tensor |
| `membership` | tensors belong to the subgraph, called subgraphs to the file |
| `values` | all that is read is made, given, a variable, or in the file |
| `kinds` | TFLite has the kind, the kind has the options, the runtime has the version |
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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from geutil.errors import TFLiteError, VerificationError
from geutil.tflite import state
from geutil.tflite.cutting import of_blocks
from geutil.tflite.parts import Contents, LiteGraph, LiteTensor
from geutil.tflite.schema import (
    DTYPES,
    PACKED_BITS,
    kind_number,
    option_names,
    option_number,
    type_numbers,
)
from geutil.tflite.shapes import output_shapes, output_types
from geutil.tflite.steps import BIASED, FIXED_SCALE, ONE_SCALE, STEPPED, one_step

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


def verify(file: Contents) -> None:
    """Check that a file keeps every invariant; see `LiteFile.verify`."""
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


_EMPTY = ("resource", "string", "variant")


def _check_values(file: Contents) -> Check:
    for graph in file.graphs:
        given = {*graph.inputs}
        read = [t for op in graph.ops for t in op.reads]
        for t in dict.fromkeys((*read, *graph.outputs)):
            known = t.makers or t in given or t.is_variable or t.buffer.size
            if not known and 0 not in t.sizes and t.dtype not in _EMPTY:
                if _is_external(t):
                    continue
                yield t, "is read, and nothing makes it or gives it"


def _is_external(tensor: LiteTensor) -> bool:
    return bool(getattr(tensor.record, "externalBuffer", 0))


_HIGHEST: Mapping[str, int] = {
    kind: version
    for version, kinds in {
        2: (
            "COS DEPTH_TO_SPACE DIV EXP FAKE_QUANT FLOOR_MOD GREATER "
            "L2_NORMALIZATION LEAKY_RELU LESS_EQUAL LOG LOG_SOFTMAX RANGE "
            "REDUCE_PROD SELECT_V2 SIGN SIN SPACE_TO_DEPTH SQRT SQUARED_DIFFERENCE "
            "SQUEEZE SUM WHERE"
        ),
        3: (
            "ARG_MAX ARG_MIN AVERAGE_POOL_2D BIDIRECTIONAL_SEQUENCE_LSTM "
            "BIDIRECTIONAL_SEQUENCE_RNN FLOOR_DIV GELU GREATER_EQUAL LESS LOGISTIC "
            "MAX_POOL_2D MEAN MIRROR_PAD REDUCE_MAX REDUCE_MIN RELU RELU6 RNN RSQRT "
            "SPARSE_TO_DENSE SPLIT_V TANH TILE TOPK_V2 UNIDIRECTIONAL_SEQUENCE_RNN"
        ),
        4: (
            "BATCH_MATMUL BATCH_TO_SPACE_ND BROADCAST_TO LSTM MAXIMUM MINIMUM "
            "NOT_EQUAL RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 SELECT "
            "SOFTMAX SPACE_TO_BATCH_ND SVDF UNIDIRECTIONAL_SEQUENCE_LSTM"
        ),
        5: "ABS EMBEDDING_LOOKUP EQUAL FILL PACK SPLIT SUB TRANSPOSE_CONV",
        6: "ADD DYNAMIC_UPDATE_SLICE GATHER_ND PAD PADV2 QUANTIZE UNPACK",
        7: "CONCATENATION DEPTHWISE_CONV_2D",
        8: "CONV_2D GATHER MUL SLICE STRIDED_SLICE",
        9: "CAST DEQUANTIZE TRANSPOSE",
        14: "FULLY_CONNECTED",
    }.items()
    for kind in kinds.split()
}
"""The highest version of a kernel, where it is not 1.

Measured: ops of each version given to the interpreter of ai-edge-litert 2.3.0, which
refuses those that it lacks.
"""


def _check_kinds(file: Contents) -> Check:
    for op in file.ops:
        if op.is_custom:
            continue
        try:
            kind_number(op.kind)
        except KeyError:
            yield op, "TFLite has no such kind"
            continue
        if not 1 <= op.version <= _HIGHEST.get(op.kind, 1):
            highest = _HIGHEST.get(op.kind, 1)
            yield op, f"its version is {op.version}, and the runtime has {highest}"
        known = {*option_names(op.table).values()} if op.table else set()
        for option, value in op.options.items():
            if option not in known:
                yield op, f"has no option '{option}'"
                continue
            try:
                option_number(option, value)
            except KeyError:
                yield op, f"'{value}' is no value of its option '{option}'"


def _check_types(file: Contents) -> Check:
    for t in file.tensors:
        if t.dtype not in type_numbers():
            yield t, f"TFLite has no type '{t.dtype}'"
    for op in file.ops:
        for t, dtype in zip(op.outputs, output_types(op), strict=False):
            if dtype is not None and t.dtype != dtype:
                yield op, f"makes {dtype}, and {t!r} is {t.dtype}"


def _check_shapes(file: Contents) -> Check:
    for op in file.ops:
        try:
            shapes = output_shapes(op)
        except TFLiteError as error:
            yield op, str(error)
            continue
        for t, shape in zip(op.outputs, shapes, strict=False):
            stated = t.shape
            if shape is None or stated is None or not (stated or t.record.hasRank):
                continue
            pairs = zip(shape, stated, strict=False)
            if len(shape) != len(stated) or any(
                a != b for a, b in pairs if a is not None and b is not None
            ):
                yield op, f"makes {[*shape]}, and {t!r} is {[*stated]}"


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


_INTEGERS = {"int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "int2"}


def _check_steps(file: Contents) -> Check:
    for t in file.tensors:
        steps = t.quantization
        if steps is None or steps.block or t.dtype not in _INTEGERS:
            continue
        scales = np.asarray(steps.scales)
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            yield t, "has a scale that is not positive"
        if len(scales) > 1:
            sizes = t.sizes
            count = sizes[steps.axis] if 0 <= steps.axis < len(sizes) else 0
            if count != len(scales):
                yield t, f"has {len(scales)} scales for {count} indices"
        bits = PACKED_BITS.get(t.dtype) or 8 * np.dtype(DTYPES[t.dtype]).itemsize
        low = 0 if t.dtype[0] == "u" else -(2 ** (bits - 1))
        if any(not low <= zero < low + 2**bits for zero in steps.zero_points):
            yield t, f"has a zero point outside of {t.dtype}"


_ROUNDING = 1e-6
"""A product of two float32 scales is rounded to 2^-23 of itself: two of them differ
by 2.4e-7."""


def _check_biases(file: Contents) -> Check:
    for op in file.ops:
        places = BIASED.get(op.kind)
        if op.is_custom or places is None or places[2] >= len(op.inputs):
            continue
        x, weights, bias = (op.inputs[place] for place in places)
        steps = [t.quantization if t else None for t in (x, weights, bias)]
        if bias is None or bias.dtype not in ("int32", "int64"):
            continue
        if any(s is None or s.block for s in steps):
            continue
        of_x, of_weights, of_bias = (np.asarray(s.scales) for s in steps if s)
        if of_x.size != 1 or of_bias.size not in (1, of_weights.size):
            counts = f"{of_x.size}, {of_weights.size} and {of_bias.size}"
            yield op, f"input, weights and bias have {counts} scales"
        elif not np.allclose(of_bias, of_x * of_weights, rtol=_ROUNDING, atol=0):
            product = (of_x * of_weights).flat[0]
            fault = f"its bias has the scale {of_bias.flat[0]:.6g}, input and weights"
            yield op, f"{fault} {product:.6g}"


def _check_scales(file: Contents) -> Check:
    for op in file.ops:
        if op.is_custom:
            continue
        for t in op.outputs:
            fixed = FIXED_SCALE.get((op.kind, t.dtype))
            if fixed is not None and one_step(t) is not None and not _same(t, *fixed):
                yield op, f"its kernel gives scale {fixed[0]:.6g}, zero {fixed[1]}"
        if op.kind not in ONE_SCALE:
            continue
        ends = [t for t in (*op.inputs, *op.outputs) if t and t.dtype in STEPPED]
        stepped = [t for t in ends if one_step(t) is not None]
        for t in stepped[1:]:
            scale, zero = one_step(stepped[0]) or (0.0, 0)
            if not _same(t, scale, zero):
                yield op, f"rescales nothing, and {stepped[0]!r} and {t!r} differ"


def _same(tensor: LiteTensor, scale: float, zero: int) -> bool:
    own = one_step(tensor)
    return own is not None and own[1] == zero and abs(own[0] - scale) <= 1e-6 * scale


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
    written: set[state.Resource] = set()
    for op in file.ops:
        if op.kind in state.WRITERS:
            written |= state.resources(op)
        for t in op.outputs:
            if t.is_variable:
                yield op, f"makes {t!r}, which is a variable"
    for graph in file.graphs:
        yield from _unset_variables(graph, written)


def _unset_variables(graph: LiteGraph, written: set[state.Resource]) -> Check:
    for op in graph.ops:
        if op.kind == "READ_VARIABLE":
            about = {one for one in state.resources(op) if one[0] == "VAR_HANDLE"}
            if about and not about & written:
                yield op, "reads a variable that no op of the file sets"


CHECKS: Mapping[str, Callable[[Contents], Check]] = {
    "order": _check_order,
    "membership": _check_membership,
    "values": _check_values,
    "kinds": _check_kinds,
    "types": _check_types,
    "shapes": _check_shapes,
    "buffers": _check_buffers,
    "steps": _check_steps,
    "biases": _check_biases,
    "scales": _check_scales,
    "signatures": _check_signatures,
    "variables": _check_variables,
}
