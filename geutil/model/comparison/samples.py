"""Random inputs for a model, drawn from dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.model.errors import ModelError

BATCH = 3
"""Rows that are drawn where the first dimension is unknown."""
_PIXELS = 32
_STEPS = 8
_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))

Arrays = dict[str, np.ndarray[Any, Any]]


def random_inputs(
    inputs: Mapping[str, Tensor],
    rng: np.random.Generator,
    batch: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> Arrays:
    """Return a random array for each input.

    Floats and complex numbers are normal (mean 0, deviation 1), integers are 0 and 1,
    of `uint8` from 0 to 255, strings are four letters long. An input with a bound gets
    numbers from 0 to below it, of whatever dtype. An unknown first dimension is 3,
    an unknown other one 32 in images (rank 4 and more), else 8; an unknown rank is
    taken for a vector.

    Args:
        inputs: the inputs of a model.
        rng: where the numbers come from.
        batch: the first dimension for some inputs, whatever their shape says.
        bounds: what the numbers of some inputs stay below; see `bounds_of_indices`.

    Raises:
        ModelError: there is no drawing values of an input's dtype.
    """
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
            # What is cut off to a whole number must not change by rounding.
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
