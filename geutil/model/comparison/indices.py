"""How large the numbers of an input may be, by the tables that they index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from geutil.graph.handles import shape_behind
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import ADDITIONS

_PASSING: Mapping[str, tuple[int, ...]] = {
    "BroadcastTo": (0,),
    "Cast": (0,),
    "EnsureShape": (0,),
    "ExpandDims": (0,),
    "Gather": (0,),
    "GatherV2": (0,),
    "Identity": (0,),
    "Pad": (0,),
    "Reshape": (0,),
    "ReverseV2": (0,),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "Slice": (0,),
    "Snapshot": (0,),
    "Split": (1,),
    "SplitV": (0,),
    "Squeeze": (0,),
    "StopGradient": (0,),
    "StridedSlice": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unpack": (0,),
}
"""Ops that hand numbers on as they are, and the inputs that these are."""
_JOINING = frozenset(("Concat", "ConcatV2", "Pack"))


def bounds_of_indices(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each input that indexes something, what its numbers stay below.

    Tables are looked for behind ops that hand numbers on as they are or add a constant,
    not in the bodies of functions. The least bound counts.

    Cost: linear in the ops behind the inputs.
    """
    found = {}
    for name, t in inputs.items():
        if not (t.dtype.is_integer or t.dtype.is_floating):
            continue
        bound = min(_bounds(t), default=None)
        if bound is not None:
            found[name] = bound
    return found


def _bounds(t: Tensor) -> Iterator[int]:
    waiting, met = [(t, 0)], {(id(t), 0)}
    for tensor, added in waiting:
        for op in tensor.consumers():
            for index, read in enumerate(op.inputs):
                if read is not tensor:
                    continue
                bound = _bound(op, index)
                # That of a sum which wraps negative indices around is nothing.
                if bound is not None and bound > added:
                    yield bound - added
                for more in _handed_on(op, index):
                    for output in op.outputs:
                        if (id(output), added + more) not in met:
                            met.add((id(output), added + more))
                            waiting.append((output, added + more))


def _handed_on(op: Operation, index: int) -> list[int]:
    """Return [what is added to an input], or [] if its numbers are not handed on."""
    if index in _PASSING.get(op.type, ()) or op.type in _JOINING:
        return [0]
    if op.type in ADDITIONS:
        added = tf.get_static_value(op.inputs[1 - index])
        if added is not None and added.ndim == 0 and added == int(added):
            return [int(added)]
    return []


def _bound(op: Operation, index: int) -> int | None:
    """Return what an op wants the numbers of an input to stay below."""
    kind = op.type
    if kind.startswith("UnsortedSegment"):
        kind = "UnsortedSegment"
    wanted, bound = _INDEXING.get(kind, (None, None))
    if bound is None or index != wanted:
        return None
    found = bound(op)
    return None if found is None else int(found)


def _dim(shape: tf.TensorShape | None, axis: int) -> int | None:
    if shape is None or shape.rank is None or not -shape.rank <= axis < shape.rank:
        return None
    dim: int | None = shape.as_list()[axis]
    return dim


def _of_gather_v2(op: Operation) -> int | None:
    axis = tf.get_static_value(op.inputs[2])
    return None if axis is None else _dim(op.inputs[0].shape, int(axis))


def _of_gather_nd(op: Operation) -> int | None:
    shape, depth = op.inputs[0].shape, _dim(op.inputs[1].shape, -1)
    if shape.rank is None or not depth:
        return None
    known = [dim for dim in shape.as_list()[:depth] if dim is not None]
    return min(known, default=None)


_INDEXING: Mapping[str, tuple[int, Callable[[Operation], int | None]]] = {
    "Gather": (1, lambda op: _dim(op.inputs[0].shape, 0)),
    "GatherNd": (1, _of_gather_nd),
    "GatherV2": (1, _of_gather_v2),
    "OneHot": (0, lambda op: tf.get_static_value(op.inputs[1])),
    "ResourceGather": (1, lambda op: _dim(shape_behind(op.inputs[0]), 0)),
    "SparseSoftmaxCrossEntropyWithLogits": (
        1,
        lambda op: _dim(op.inputs[0].shape, -1),
    ),
    "UnsortedSegment": (1, lambda op: tf.get_static_value(op.inputs[2])),
}
"""Ops that index something: by which input, and how long it is."""
