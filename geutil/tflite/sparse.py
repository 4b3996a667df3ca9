"""Sparse constants: zeros that a file leaves out, filled in.

A sparse tensor lists its values along its dimensions in some order, and along blocks
of them; a dimension is dense, or lists the places of what is not zero. The format is
that of TACO (Kjolstad et al. 2017, https://doi.org/10.1145/3133901).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite.parts import Array, LiteTensor
from geutil.tflite.schema import DTYPES, schema


def densified(tensor: LiteTensor) -> Array:
    """Return the array of a sparse constant, with its zeros.

    Raises:
        TFLiteError: its list of places does not fit its shape, or its type is packed.

    Cost: linear in the array.
    """
    if tensor.dtype not in DTYPES or tensor.buffer.data is None:
        raise TFLiteError(
            f"sparse '{tensor.name}' is {tensor.dtype}, and cannot be read"
        )
    record, shape = tensor.record.sparsity, tensor.sizes
    order = np.asarray(record.traversalOrder).tolist()
    blocks = [] if record.blockMap is None else np.asarray(record.blockMap).tolist()
    values = tensor.buffer.data.view(DTYPES[tensor.dtype])
    try:
        places = _places(record.dimMetadata)
        index = [np.zeros(values.size, np.int64) for _ in shape]
        for level, dimension in enumerate(order):
            if dimension < len(shape):
                index[dimension] += places[level] * _block(record, order, dimension)
        for level, dimension in enumerate(order):
            if dimension >= len(shape):
                index[blocks[dimension - len(shape)]] += places[level]
        made = np.zeros(shape, values.dtype)
        made[tuple(index)] = values
    except (LookupError, TypeError, ValueError) as error:
        raise TFLiteError(
            f"the file is damaged: the places of '{tensor.name}' do not fit its values"
        ) from error
    return made


def _block(record: Any, order: list[int], dimension: int) -> int:
    """Return the size of the blocks of a dimension, 1 without."""
    blocks = [] if record.blockMap is None else np.asarray(record.blockMap).tolist()
    if dimension not in blocks:
        return 1
    number = len(order) - len(blocks) + blocks.index(dimension)
    return int(record.dimMetadata[order.index(number)].denseSize)


def _places(levels: Any) -> list[Array]:
    """Return the place of each stored value along each level."""
    sparse = schema().DimensionType.SPARSE_CSR
    places: list[Array] = []
    count = 1
    for level in levels:
        if level.format == sparse:
            segments = np.asarray(level.arraySegments.values, np.int64)
            parents = np.repeat(np.arange(count), np.diff(segments))
            own = np.asarray(level.arrayIndices.values, np.int64)
        else:
            parents = np.repeat(np.arange(count), level.denseSize)
            own = np.tile(np.arange(level.denseSize), count)
        places = [each[parents] for each in places]
        places.append(own)
        count = own.size
    return places
