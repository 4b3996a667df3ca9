"""The values of parameters: float64 arrays where they are constant, else tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.batchnorm.arithmetic import Value
from geutil.graph.kinds import Operation, Tensor

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
    """Return the value of a parameter that only constants go into, in float64.

    What the graph would round to float32 on the way is not rounded here.

    Args:
        tensor: a parameter.

    Returns:
        The value; None if a variable, or an op that is not known here, goes into it.

    Cost: linear in the ops behind the tensor.
    """
    known: dict[Operation, np.ndarray[Any, Any] | None] = {}
    waiting = [tensor.op]
    while waiting:
        op = waiting[-1]
        if op in known:
            waiting.pop()
            continue
        missing = [t.op for t in op.inputs if t.op not in known]
        if op.type == "Const" or not missing:
            known[op] = _value(op, known)
            waiting.pop()
        else:
            waiting += missing
    return known[tensor.op]


def _value(
    op: Operation, known: dict[Operation, np.ndarray[Any, Any] | None]
) -> np.ndarray[Any, Any] | None:
    if op.type == "Const":
        value = tf.make_ndarray(op.get_attr("value"))
        numeric = value.dtype.kind in "fiu" or value.dtype == tf.bfloat16.as_numpy_dtype
        return np.asarray(value, np.float64) if numeric else None
    inputs = [known[t.op] for t in op.inputs]
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


def ops_behind(tensors: Iterable[Tensor]) -> list[Operation]:
    """Return the ops that parameters are computed by.

    Cost: linear in these.
    """
    found: dict[Operation, None] = {}
    waiting = [t.op for t in tensors]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found[op] = None
            waiting.extend(t.op for t in op.inputs)
    return list(found)


def unrounded(tensor: Tensor) -> Tensor:
    """Return what a parameter was before it was cast to fewer bits."""
    while tensor.op.type in ("Cast", "Identity"):
        before = tensor.op.inputs[0]
        if not before.dtype.is_floating or before.dtype.size < tensor.dtype.size:
            break
        tensor = before
    return tensor


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
