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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from geutil.errors import VerificationError
from geutil.tflite import state
from geutil.tflite.arguments import checked
from geutil.tflite.cutting import of_blocks
from geutil.tflite.fitting import OP_CHECKS
from geutil.tflite.parts import Contents, LiteGraph, LiteTensor
from geutil.tflite.schema import DTYPES, PACKED_BITS, type_numbers
from geutil.tflite.steps import faults_of_steps

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


def _check_types(file: Contents) -> Check:
    for t in file.tensors:
        if t.dtype not in type_numbers():
            yield t, f"TFLite has no type '{t.dtype}'"
    yield from _of_ops("types")(file)


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


def _check_steps(file: Contents) -> Check:
    for t in file.tensors:
        for fault in faults_of_steps(t.quantization, t.dtype, t.sizes):
            yield t, fault


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
    for t in file.tensors:
        if t.is_variable and t.buffer.size:
            yield t, "is a variable, and has values in the file, which none begins with"
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
