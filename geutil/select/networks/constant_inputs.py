"""Constants and variables that stand where a network has its inputs.

A graph that is fed nothing computes with them: `x = tf.zeros([1, 224, 224, 3])` is how
networks are built to be looked at, or timed. Layers cannot be told from products of
weights there, unless it is known what stands in for the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from geutil.graph.kinds import Operation, Tensor, is_reference
from geutil.graph.op_types import LOOKUPS

DATA_SLOTS = {
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"), 0),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum"), 0),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), 2),
}
"""Which input of a layer is the data, by its type, if all may be."""
_FED = "Placeholder"
_SHAPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))
_READ = "ReadVariableOp"
_MADE = frozenset(("Fill",))
_RANDOM = ("Random", "Stateless", "Truncated")

IsParameter = Callable[[Tensor], bool]


def constant_inputs(
    ops: Sequence[Operation], is_parameter: IsParameter
) -> frozenset[Operation]:
    """Return the ops whose results stand in for the inputs of a network.

    None if anything is fed, numbers or what they are looked up by, or no layer reads
    parameters alone. Products that are weights of other layers count for nothing.

    Args:
        ops: the ops of the graph, in topological order.
        is_parameter: tells whether a tensor depends on constants and variables only.

    Cost: linear in ops and edges.
    """
    layers = [op for op in ops if op.type in DATA_SLOTS]
    if not layers or any(_is_fed(op, is_parameter) for op in ops):
        return frozenset()
    if any(_makes_numbers(op, is_parameter) for op in _behind_indices(ops)):
        return frozenset()
    weights = _weights_of(ops)
    candidates = [op for op in layers if all(is_parameter(t) for t in op.inputs)]
    behind = _behind(ops, candidates)
    starts = [op for op in candidates if op not in weights]
    return frozenset(_all_reads(_roots(starts, behind), ops))


def _is_fed(op: Operation, is_parameter: IsParameter) -> bool:
    """Tell whether an op makes numbers of something else than numbers, or of nothing.

    Random ones are no input, but noise.
    """
    if not _makes_numbers(op, is_parameter):
        return False
    computed = any(t.dtype.is_floating for t in op.inputs)
    return op.type.startswith(_FED) or not (computed or op.type.startswith(_RANDOM))


def _makes_numbers(op: Operation, is_parameter: IsParameter) -> bool:
    return any(t.dtype.is_floating and not is_parameter(t) for t in op.outputs)


def _behind_indices(ops: Sequence[Operation]) -> list[Operation]:
    """Return the ops that depend on values of integers or strings that are fed.

    Tokens that a table is looked up by, for one. A number alone is a count of steps,
    and shapes are no values.
    """
    found: dict[Operation, None] = {}
    for op in ops:
        if op.type in _SHAPES:
            continue
        fed = op.type.startswith(_FED) and any(map(_is_index, op.outputs))
        if fed or any(t.op in found for t in op.inputs):
            found[op] = None
    return list(found)


def _is_index(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return (kind.is_integer or kind == tf.string) and tensor.shape.rank != 0


def _weights_of(ops: Sequence[Operation]) -> set[Operation]:
    """Return what layers depend on by an input that is not their data."""
    found: set[Operation] = set()
    for op in reversed(ops):
        data = DATA_SLOTS.get(op.type)
        for index, t in enumerate(op.inputs):
            if op in found or (data is not None and index != data):
                found.add(t.op)
    return found


def _behind(ops: Sequence[Operation], layers: Sequence[Operation]) -> set[Operation]:
    found = set(layers)
    for op in ops:
        if any(t.op in found for t in op.inputs):
            found.add(op)
    return found


def _roots(starts: Sequence[Operation], behind: set[Operation]) -> list[Operation]:
    """Go back from layers by their data, to where that comes from."""
    seen: set[Operation] = set()
    found: dict[Operation, None] = {}
    for op in starts:
        while op not in seen:
            seen.add(op)
            before = _data_of(op, behind)
            if before is None:
                found[op] = None
                break
            op = before
    return list(found)


def _all_reads(roots: Sequence[Operation], ops: Sequence[Operation]) -> list[Operation]:
    """Return ops, and what else reads the variables that they read."""
    handles = {op.inputs[0].op for op in roots if op.type == _READ}
    reads = (op for op in ops if op.type == _READ and op.inputs[0].op in handles)
    return list(dict.fromkeys((*roots, *reads)))


def _data_of(op: Operation, behind: set[Operation]) -> Operation | None:
    """Return where the data of an op comes from; None if it is made there."""
    if op.type in _MADE:
        return None
    if op.type in DATA_SLOTS:
        return op.inputs[DATA_SLOTS[op.type]].op
    if op.type in LOOKUPS:
        return op.inputs[1].op
    given = [t for t in op.inputs if t.dtype.is_floating and not is_reference(t)]
    if not given:
        return None
    later = [t.op for t in given if t.op in behind]
    return later[0] if later else max(given, key=_rank).op


def _rank(tensor: Tensor) -> int:
    return -1 if tensor.shape.rank is None else int(tensor.shape.rank)
