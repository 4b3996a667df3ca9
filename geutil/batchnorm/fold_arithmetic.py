"""The arithmetic of folding.

Values of parameters, their products, the scale and shift of a run of steps.

Every function takes numpy arrays or TensorFlow tensors, all of one kind, and uses
nothing but their operators, `reshape` and a root. A batch norm computes, channel by
channel,

    y = gamma * (x - mean) / sqrt(variance + epsilon) + beta = scale * x + offset

(Ioffe and Szegedy 2015, arXiv 1502.03167). A layer that is linear in its weights
absorbs the scale in them, and the offset in its bias (Krishnamoorthi 2018, arXiv
1806.08342, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.batchnorm.batch_statistics import read_moving, with_moving
from geutil.batchnorm.norms import AffineKind, AffineStep
from geutil.graph import adjacency
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import topological_order
from geutil.select.networks.batch_norms import MovingVariable, fused_norm

Value = Any
"""A numpy array, a TensorFlow tensor or a number."""


def rsqrt(value: Value) -> Value:
    """Return 1 / sqrt(value)."""
    if isinstance(value, np.ndarray | float):
        return 1.0 / np.sqrt(value)
    return tf.math.rsqrt(value)


def scale_and_offset(
    mean: Value,
    variance: Value,
    epsilon: float,
    gamma: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    """Return the scale and the offset of a batch norm, for each channel.

    Example:
        >>> import numpy as np
        >>> scale_and_offset(np.array([1.0]), np.array([3.0]), 1.0, np.array([4.0]))
        (array([2.]), array([-2.]))
    """
    # scale = gamma / sqrt(variance + epsilon); offset = beta - mean * scale.
    # `mean`: the mean of each channel, shape [C].
    # `variance`: its variance, biased, shape [C].
    # `gamma`: the scale after normalization, shape [C]; None is 1.
    # `beta`: the offset after normalization, shape [C]; None is 0.
    scale = rsqrt(variance + epsilon)
    if gamma is not None:
        scale = scale * gamma
    offset = -(mean * scale)
    return scale, offset if beta is None else beta + offset


def along_axes(
    value: Value, rank: int, axes: Sequence[int], sizes: Sequence[int]
) -> Value:
    """Return a vector of channels in a shape that weights can be multiplied by.

    Example:
        >>> import numpy as np
        >>> along_axes(np.arange(6.0), 4, (2, 3), (2, 3)).shape
        (1, 1, 2, 3)
    """
    # `value`: shape [C], or a scalar, which is returned as it is.
    if not value.shape.rank if isinstance(value, tf.Tensor) else not np.ndim(value):
        return value
    shape = [1] * rank
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    if isinstance(value, np.ndarray):
        return value.reshape(shape)
    # A vector goes along the last axis as it is.
    return value if tuple(axes) == (rank - 1,) else tf.reshape(value, shape)


def shift_through(weights: Value, shift: Value, output_axes: Sequence[int]) -> Value:
    """Return a layer's response to a shift of its data: the sum of weights * shift.

    Example:
        >>> import numpy as np
        >>> weights = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> shift_through(weights, np.array([[1.0], [10.0]]), [1])
        array([31., 42.])
    """
    # `shift`: the shift of each channel of the data, in a shape that broadcasts with
    # the weights.
    # `output_axes`: the axes of the weights that count the channels of the result; the
    # sum is over all others.
    # Returns a vector: the shift of each channel of the result, at the positions where
    # all of the window lies within the data.
    product = weights * shift
    if isinstance(product, np.ndarray):
        others = tuple(i for i in range(product.ndim) if i not in output_axes)
        return product.sum(others).reshape(-1)
    rank = product.shape.rank
    others = tuple(i for i in range(rank) if i not in output_axes)
    return tf.reshape(tf.reduce_sum(product, others), [-1])


class Affine:
    """The affine map of a run of steps, for each channel: x * scale + offset.

    Example:
        >>> Affine().plus(3.0).times(2.0).plus(1.0)
        Affine(2.0, 7.0)
    """

    def __init__(self, scale: Value | None = None, offset: Value | None = None) -> None:
        self.scale = scale
        self.offset = offset

    def times(self, value: Value) -> Affine:
        """Return this, then times `value`."""
        scale = value if self.scale is None else self.scale * value
        return Affine(scale, None if self.offset is None else self.offset * value)

    def plus(self, value: Value) -> Affine:
        """Return this, then plus `value`."""
        offset = value if self.offset is None else self.offset + value
        return Affine(self.scale, offset)

    def __repr__(self) -> str:
        return f"Affine({self.scale}, {self.offset})"


_PASSED_ON = frozenset(("Identity", "Snapshot", "StopGradient"))

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "BiasAdd": np.add,
    "Exp": np.exp,
    "Fill": lambda shape, x: np.full(shape.astype(np.int64), x),
    "Log": np.log,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "OnesLike": np.ones_like,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Reciprocal": np.reciprocal,
    "Rsqrt": lambda x: 1.0 / np.sqrt(x),
    "Slice": lambda x, start, size: x[int(start[0]) :][: int(size[0])],
    "Sqrt": np.sqrt,
    "Square": np.square,
    "Sub": np.subtract,
    "ZerosLike": np.zeros_like,
    "Cast": lambda x: x,
    "Reshape": lambda x, shape: np.reshape(x, shape.astype(np.int64)),
    "Transpose": lambda x, order: np.transpose(x, order.astype(np.int64)),
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis.reshape(()))),
}


def constant(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Return the value of a parameter that only constants go into, in float64."""
    # Values that the graph would round to float32 on the way are not rounded here.
    # Returns the value; None if a variable, or an op that is not known here, goes into
    # it.
    value_by_op: dict[Operation, np.ndarray[Any, Any] | None] = {}
    for op in topological_order([tensor.op], adjacency.producers):
        value_by_op[op] = _value(op, value_by_op)
    return value_by_op[tensor.op]


def _value(
    op: Operation, value_by_op: dict[Operation, np.ndarray[Any, Any] | None]
) -> np.ndarray[Any, Any] | None:
    if op.type == "Const":
        value = tf.make_ndarray(op.get_attr("value"))
        numeric = value.dtype.kind in "fiu" or value.dtype == tf.bfloat16.as_numpy_dtype
        return np.asarray(value, np.float64) if numeric else None
    inputs = [value_by_op[t.op] for t in op.inputs]
    if any(value is None for value in inputs) or len(op.outputs) != 1:
        return None
    if op.type in _PASSED_ON:
        return inputs[0]
    if op.type == "Squeeze" and inputs[0] is not None:
        return np.squeeze(inputs[0], tuple(op.get_attr("squeeze_dims")) or None)
    if op.type == "Pack":
        return np.stack(inputs, op.get_attr("axis"))  # type: ignore[arg-type]
    if op.type == "ConcatV2":
        *parts, axis = inputs
        return np.concatenate(parts, int(axis.reshape(())))  # type: ignore[arg-type,union-attr]
    function = _FUNCTIONS.get(op.type)
    return None if function is None else np.asarray(function(*inputs), np.float64)


def unrounded(tensor: Tensor) -> Tensor:
    """Return a parameter as it was before it was cast to fewer bits."""
    # Without a cast it is the tensor itself, for gradients may be asked for there.
    found = tensor
    while tensor.op.type in ("Cast", "Identity"):
        before = tensor.op.inputs[0]
        if not before.dtype.is_floating or before.dtype.size < tensor.dtype.size:
            break
        if tensor.op.type == "Cast":
            found = before
        tensor = before
    return found


def wide(dtype: tf.DType) -> tf.DType:
    """Return the type that values of a type are computed in where they are tensors."""
    return dtype if dtype == tf.float64 else tf.float32


def as_vector(value: Value) -> Value:
    """Return a parameter of channels as a vector, or a scalar as a scalar."""
    if isinstance(value, tf.Tensor):
        if value.shape.num_elements() == 1:
            return tf.reshape(value, [])
        if value.shape.rank == 1:
            return value
        if value.shape.is_fully_defined():
            # One op, where a reshape takes two.
            single = [i for i, size in enumerate(value.shape) if size == 1]
            if len(single) == value.shape.rank - 1:
                return tf.squeeze(value, single)
        return tf.reshape(value, [-1])
    return value.reshape(()) if value.size == 1 else value.reshape(-1)


def composed(steps: Sequence[AffineStep]) -> Affine | None:
    """Return the composition of steps, for each channel, as float64 arrays."""
    # None if a variable goes into them.
    values: list[list[Value]] = []
    for step in steps:
        arrays = [constant(t) for t in step.parameters]
        if any(array is None for array in arrays):
            return None
        values.append([as_vector(array) for array in arrays])
    return _composed(steps, values)


def computed(
    steps: Sequence[AffineStep], moving: Sequence[MovingVariable] = ()
) -> Affine:
    """Return the composition of steps, for each channel, as new tensors."""
    reads = [(entry.statistic, read_moving(entry)) for entry in moving]
    new = {id(statistic): read for statistic, read in reads}

    def value(tensor: Tensor) -> Tensor:
        tensor = unrounded(with_moving(tensor, reads) if reads else tensor)
        return as_vector(tf.cast(tensor, wide(tensor.dtype)))

    values = []
    for step in steps:
        parameters = list(step.parameters)
        fused = fused_norm(step.op)
        # A fused kernel in training makes its moments itself, and does not read them.
        if fused is not None:
            statistics = zip(parameters[2:], fused.moments, strict=True)
            parameters[2:] = [new.get(id(moment), read) for read, moment in statistics]
        values.append([value(t) for t in parameters])
    return _composed(steps, values)


def _composed(steps: Sequence[AffineStep], values: Sequence[Sequence[Value]]) -> Affine:
    """Return the affine map of some steps, applied one after the other."""
    affine = Affine()
    for step, parameters in zip(steps, values, strict=True):
        if step.kind is AffineKind.NORMALIZE:
            gamma, beta, mean, variance = parameters
            epsilon = float(step.op.get_attr("epsilon"))
            scale, offset = scale_and_offset(mean, variance, epsilon, gamma, beta)
            affine = affine.times(scale).plus(offset)
            continue
        (value,) = parameters
        match step.kind:
            case AffineKind.MULTIPLY:
                affine = affine.times(value)
            case AffineKind.DIVIDE:
                affine = affine.times(1.0 / value)
            case AffineKind.ADD:
                affine = affine.plus(value)
            case AffineKind.SUBTRACT:
                affine = affine.plus(-value)
            case AffineKind.SUBTRACT_FROM:
                affine = affine.times(_minus_one(value)).plus(value)
    return affine


def _minus_one(value: Value) -> Value:
    return np.float64(-1.0) if isinstance(value, np.ndarray) else -tf.ones_like(value)
