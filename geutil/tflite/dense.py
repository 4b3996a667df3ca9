"""Constants of a TFLite file as arrays: sparse ones filled in, strings told apart.

A sparse tensor stores the values of its blocks along a tree. Each level of the tree is
one dimension, in the order in which the file goes through them: a dense level has all
indices of its dimension below each node, a sparse one those that the file lists, in
rows that it counts (CSR). The leaves are the values in their order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite.parts import Array, LiteTensor
from geutil.tflite.schema import DTYPES, PACKED_BITS, schema


def dense(tensor: LiteTensor) -> Array | None:
    """Return the values of a constant, whether it is stored sparse or not."""
    data = tensor.buffer.data
    if 0 in tensor.sizes:
        return np.zeros(tensor.sizes, DTYPES.get(tensor.dtype, np.int8))
    if data is None or not data.size:
        return None
    if tensor.dtype == "string":
        # They lie behind their count and the places of their ends.
        raw = data.tobytes()
        ends = np.frombuffer(
            raw, np.int32, int(np.frombuffer(raw, np.int32, 1)[0]) + 1, 4
        )
        texts = [raw[start:end] for start, end in pairwise(ends.tolist())]
        return np.array(texts, object).reshape(tensor.sizes)
    if not tensor.is_sparse:
        return tensor.value
    return _filled_in(tensor, data)


def _filled_in(tensor: LiteTensor, data: Array) -> Array:
    if tensor.dtype not in DTYPES or tensor.dtype in PACKED_BITS:
        raise TFLiteError(f"{tensor.label} is sparse, and of type {tensor.dtype}")
    stored = data.view(DTYPES[tensor.dtype])
    parameters = tensor.record.sparsity
    order = np.asarray(parameters.traversalOrder).tolist()
    blocks = () if parameters.blockMap is None else parameters.blockMap
    blocked = np.asarray(blocks).tolist()
    levels = parameters.dimMetadata
    rank = len(tensor.sizes)
    if len(order) != len(levels) or len(order) != rank + len(blocked):
        raise TFLiteError(
            f"{tensor.label} is sparse in {len(levels)} dimensions, and has {rank} "
            f"and blocks in {len(blocked)}"
        )
    # By the dimension, those of blocks last: the index of each value along it.
    places: dict[int, Array] = {}
    count = 1
    for dimension, level in zip(order, levels, strict=True):
        parents, indices = _below(level, count)
        places = {key: place[parents] for key, place in places.items()}
        places[dimension] = indices
        count = indices.size
    if count != stored.size:
        raise TFLiteError(
            f"{tensor.label} is sparse and has {stored.size} values for {count} places"
        )
    for inner, dimension in enumerate(blocked, rank):
        size = int(levels[order.index(inner)].denseSize)
        places[dimension] = places[dimension] * size + places[inner]
    result = np.zeros(tensor.sizes, stored.dtype)
    try:
        result[tuple(places[dimension] for dimension in range(rank))] = stored
    except IndexError as error:
        raise TFLiteError(f"{tensor.label} is sparse outside its shape") from error
    return result


def _below(level: Any, count: int) -> tuple[Array, Array]:
    """Return for each node of the next level its parent, and its index below that."""
    if level.format == schema().DimensionType.DENSE:
        indices = np.arange(int(level.denseSize))
        return np.repeat(np.arange(count), indices.size), np.tile(indices, count)
    ends = np.asarray(level.arraySegments.values, np.int64)
    parents = np.repeat(np.arange(count), np.diff(ends))
    return parents, np.asarray(level.arrayIndices.values, np.int64)
