"""Random inputs for a model, from dtypes, shapes, and the tables that they index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import op_types, resource_variables
from geutil.graph.types import Operation, Tensor

BATCH = 3
"""Rows that are drawn where the first dimension is unknown."""
_PIXELS = 32
"""The length of unknown axes of images."""
_STEPS = 8
"""The length of other unknown axes, such as time."""
_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))

Arrays = dict[str, np.ndarray[Any, Any]]


def random_inputs(
    inputs: Mapping[str, Tensor],
    rng: np.random.Generator,
    batch: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> Arrays:
    """Return a random array for each input."""
    # Floats and complex numbers are normal (mean 0, deviation 1), integers are 0 and 1,
    # of `uint8` from 0 to 255, strings are four letters long. An input with a bound
    # gets numbers from 0 to below it, of whatever dtype. An unknown first dimension is
    # 3, an unknown other one 32 in images (rank 4 and more), else 8; an unknown rank is
    # a vector's.
    arrays = {}
    for name, t in inputs.items():
        shape = [None] if t.shape.rank is None else t.shape.as_list()
        other = _PIXELS if len(shape) >= 4 else _STEPS
        sizes = [
            d if d is not None else other if i else BATCH for i, d in enumerate(shape)
        ]
        if batch is not None and name in batch:
            sizes[0] = batch[name]
        bound = (bounds or {}).get(name)
        if bound is not None and (t.dtype.is_integer or t.dtype.is_floating):
            whole = rng.integers(0, min(bound, t.dtype.max), sizes)
            # The fraction that is cut off must not change by rounding.
            between = 0.25 if t.dtype in (tf.float32, tf.float64) else 0
            arrays[name] = (whole + between).astype(t.dtype.as_numpy_dtype)
        else:
            arrays[name] = _draw(name, t.dtype, sizes, rng)
    return arrays


def _draw(
    name: str, dtype: Any, shape: list[int], rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    if dtype == tf.string:
        letters = rng.choice(_LETTERS, [*shape, 4])
        return np.apply_along_axis(
            lambda row: "".join(row).encode(), -1, letters
        ).astype(object)
    if dtype == tf.bool:
        return rng.random(shape) < 0.5
    if dtype.is_complex:
        return np.asarray(
            rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype.as_numpy_dtype
        )
    if dtype.is_floating:
        return np.asarray(rng.normal(size=shape), dtype.as_numpy_dtype)
    if dtype.is_integer:
        if dtype == tf.uint8:
            return rng.integers(0, 256, shape, np.uint8)
        bits = rng.integers(0, 2, shape)
        # Both are there, so that rows differ.
        bits.flat[:1] = 1 - bits.flat[-1:]
        return bits.astype(dtype.as_numpy_dtype)
    raise ModelError(
        f"there are no random values for input '{name}' of dtype {dtype.name}; pass "
        "some"
    )


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
    """Return, for each input that is an index, the bound of its numbers."""
    # Tables are looked for behind ops that hand numbers on as they are or add a
    # constant, not in the bodies of functions. The least bound counts.
    bound_by_name = {}
    for name, t in inputs.items():
        if not (t.dtype.is_integer or t.dtype.is_floating):
            continue
        bound = min(_bounds(t), default=None)
        if bound is not None:
            bound_by_name[name] = bound
    return bound_by_name


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
    """Return [the number added to an input], or [] if its numbers are not passed on."""
    if index in _PASSING.get(op.type, ()) or op.type in _JOINING:
        return [0]
    if op.type in op_types.ADDITIONS:
        added = tf.get_static_value(op.inputs[1 - index])
        if added is not None and added.ndim == 0 and added == int(added):
            return [int(added)]
    return []


def _bound(op: Operation, index: int) -> int | None:
    """Return the bound that an op sets to the numbers of an input."""
    kind = op.type
    if kind.startswith("UnsortedSegment"):
        kind = "UnsortedSegment"
    operand_index, bound = _INDEXING.get(kind, (None, None))
    if bound is None or index != operand_index:
        return None
    limit = bound(op)
    return None if limit is None else int(limit)


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
    static_dims = [dim for dim in shape.as_list()[:depth] if dim is not None]
    return min(static_dims, default=None)


_INDEXING: Mapping[str, tuple[int, Callable[[Operation], int | None]]] = {
    "Gather": (1, lambda op: _dim(op.inputs[0].shape, 0)),
    "GatherNd": (1, _of_gather_nd),
    "GatherV2": (1, _of_gather_v2),
    "OneHot": (0, lambda op: tf.get_static_value(op.inputs[1])),
    "ResourceGather": (
        1,
        lambda op: _dim(resource_variables.shape_behind(op.inputs[0]), 0),
    ),
    "SparseSoftmaxCrossEntropyWithLogits": (
        1,
        lambda op: _dim(op.inputs[0].shape, -1),
    ),
    "UnsortedSegment": (1, lambda op: tf.get_static_value(op.inputs[2])),
}
"""Ops that index something: by which input, and how long it is."""
