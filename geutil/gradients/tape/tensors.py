"""Gradients that are TensorFlow's tensors, in a graph or eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.gradients.tape.captured import number_of
from geutil.gradients.tape.spaces import VSpace

Gradient = Any
"""A tensor, or `tf.IndexedSlices`."""


def tensorflow_vspace() -> VSpace:
    """Return the space of TensorFlow's tensors.

    Slices stay slices as long as all that is added is slices.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients.tape import tensorflow_vspace
        >>> rows = tf.IndexedSlices(
        ...     tf.ones([1, 2]), tf.constant([3]), tf.constant([9, 2])
        ... )
        >>> total = tensorflow_vspace().aggregate_fn([rows, rows])
        >>> total.indices.numpy().tolist()
        [3, 3]
    """
    return VSpace(aggregate, num_elements, number_of, zeros, tf.ones_like)


def zeros(shape: Any, dtype: Any) -> Any:
    """Return zeros.

    Args:
        shape: their shape, or a tensor of that shape. A list of tensors can only be
            made of such a list.
        dtype: their dtype.
    """
    if not isinstance(shape, tf.Tensor):
        return tf.zeros(shape, dtype)
    # The shape is all that has to be held of the tensor.
    same = dtype == tf.variant
    return tf.zeros_like(shape) if same else tf.zeros(tf.shape(shape), dtype)


def aggregate(gradients: Sequence[Gradient]) -> Gradient:
    """Return the sum of gradients."""
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(g, tf.IndexedSlices) for g in gradients):
        return _concatenated(gradients)
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients])


def _concatenated(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    values = tf.concat([s.values for s in slices], 0)
    # Of several widths the wider one holds all.
    kinds = {s.indices.dtype for s in slices}
    kind = slices[0].indices.dtype if len(kinds) == 1 else tf.int64
    indices = tf.concat([tf.cast(s.indices, kind) for s in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def num_elements(gradient: Gradient) -> int:
    """Return the number of elements; dimensions that are not known count as one."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    shape = gradient.shape
    return 1 if shape.rank is None else int(np.prod([n or 1 for n in shape.as_list()]))
