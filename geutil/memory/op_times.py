"""How long ops take, each kind run for itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.types import Operation, Tensor

_SMALL = 1 << 16
"""Ops that read and make fewer bytes are not run: calling them takes longer."""
_ROUNDS = 3
_MOST_VALUES = 64

Dims = Callable[[Tensor], Sequence[int | None] | None]


def op_times(ops: Iterable[Operation], dims_of: Dims) -> dict[str, float]:
    """Return the seconds that large ops take, run one by one on made-up numbers.

    Ops of one type, with the same attributes and shapes, are run once for all, outside
    of their graph. What cannot be run so (variables, strings, calls, unknown shapes)
    has no time, and nothing has where TensorFlow does not run eagerly.

    Args:
        ops: the ops.
        dims_of: the dimensions of a tensor, where its static shape leaves some open.

    Returns:
        Seconds by the name of the op: the least of three runs.

    Cost: that of running each kind of op four times.

    Example:
        >>> import tensorflow as tf
        >>> with tf.Graph().as_default():
        ...     x = tf.random.normal([256, 256])
        ...     y = tf.matmul(x, x, name="y")
        >>> list(op_times([y.op], lambda t: t.shape.as_list()))
        ['y']
    """
    # A thread of its own is in no graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_op_times, list(ops), dims_of).result()


def _op_times(ops: Sequence[Operation], dims_of: Dims) -> dict[str, float]:
    """Return the seconds that large ops take; see `op_times`."""
    known: dict[str, float | None] = {}
    times: dict[str, float] = {}
    for op in ops if tf.executing_eagerly() else ():
        inputs = [_Input(t, dims_of(t)) for t in op.inputs]
        made = sum(_size(t, dims_of(t)) for t in op.outputs)
        if sum(i.bytes for i in inputs) + made < _SMALL:
            continue
        key = repr((op.type, [i.key for i in inputs], made, _attributes(op)))
        if key not in known:
            shape = dims_of(op.outputs[0]) if op.outputs else None
            known[key] = _seconds(op, inputs, shape)
        seconds = known[key]
        if seconds is not None:
            times[op.name] = seconds
    return times


class _Input:
    """What an op reads, as it can be made up.

    Attributes:
        key: what tells it from other inputs.
        bytes: its size; 0 if that is not known.
    """

    def __init__(self, tensor: Tensor, dims: Sequence[int | None] | None) -> None:
        self._dtype = tensor.dtype.base_dtype
        self._dims = dims
        small = tensor.dtype.is_integer and _size(tensor, dims) <= 8 * _MOST_VALUES
        # Axes, shapes and paddings.
        self._value = tf.get_static_value(tensor) if small else None
        value = None if self._value is None else np.asarray(self._value).tolist()
        self.key = (self._dtype.name, dims, value)
        self.bytes = _size(tensor, dims)

    def made_up(self) -> tf.Tensor | None:
        """Return numbers of this kind; None if they cannot be made up."""
        if self._value is not None:
            return tf.constant(self._value, self._dtype)
        if self._dims is None or None in self._dims:
            return None
        dims = [int(d or 0) for d in self._dims]
        if self._dtype.is_floating:
            numbers = np.random.default_rng(0).normal(size=dims)
            return tf.cast(numbers.astype(np.float32), self._dtype)
        # Few integers may be a shape or axes, which have to fit.
        many = math.prod(dims) > _MOST_VALUES
        if self._dtype.is_bool or (self._dtype.is_integer and many):
            return tf.zeros(dims, self._dtype)
        return None


def _size(tensor: Tensor, dims: Sequence[int | None] | None) -> int:
    if dims is None or None in dims:
        return 0
    return math.prod(int(d or 0) for d in dims) * int(tensor.dtype.size or 0)


def _attributes(op: Operation) -> list[tuple[str, bytes]]:
    return [
        (name, value.SerializeToString(deterministic=True))
        for name, value in sorted(op.node_def.attr.items())
        if not name.startswith("_")
    ]


_OWN_SHAPE = {
    "Conv2DBackpropFilter": 1,
    "Conv2DBackpropInput": 0,
    "DepthwiseConv2dNativeBackpropFilter": 1,
    "DepthwiseConv2dNativeBackpropInput": 0,
    "Reshape": 1,
}
"""Ops that are told the shape of what they make, with the input that tells it."""


def _seconds(
    op: Operation, inputs: Sequence[_Input], shape: Sequence[int | None] | None
) -> float | None:
    """Return how long an op takes outside of its graph; None if it cannot run there."""
    run = getattr(tf.raw_ops, op.type, None)
    try:
        values = [i.made_up() for i in inputs]
        if op.type in _OWN_SHAPE and shape and None not in shape:
            values[_OWN_SHAPE[op.type]] = tf.constant(shape)
        if run is None or not values or any(value is None for value in values):
            return None
        arguments = _arguments(op, values, list(signature(run).parameters))
        run(**arguments)
        tf.test.experimental.sync_devices()
        seconds = []
        for _ in range(_ROUNDS):
            began = perf_counter()
            run(**arguments)
            # A GPU runs it behind the caller's back.
            tf.test.experimental.sync_devices()
            seconds.append(perf_counter() - began)
    except (IndexError, TypeError, ValueError, tf.errors.OpError):
        # Numbers that the op does not take, or an attribute of functions.
        return None
    return min(seconds)


def _arguments(
    op: Operation, values: Sequence[Any], parameters: Sequence[str]
) -> dict[str, Any]:
    """Return what the op's function is called with, by name.

    Args:
        op: the op.
        values: its inputs.
        parameters: the names that the function has for inputs and attributes; the axes
            of reductions are called otherwise than in the op's definition.
    """
    left = list(values)
    arguments: dict[str, Any] = {}
    inferred = set()
    others = [name for name in parameters if name == "axis"]
    for argument in op.op_def.input_arg:
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        else:
            is_known = argument.name in parameters
            name = argument.name if is_known else others.pop()
            arguments[name] = left.pop(0)
            continue
        arguments[argument.name] = [left.pop(0) for _ in range(count)]
    for attribute in op.op_def.attr:
        if attribute.name not in inferred:
            arguments[attribute.name] = op.get_attr(attribute.name)
    return arguments
