"""Constants of TFLite files as variables, and steps of integers as FakeQuant ops.

Integers stand for numbers, `scale * (integer - zero point)`. The numbers of weights
become a variable that can be trained, and a FakeQuant op behind it has the ranges of
the file, in two variables `<name>/min` and `<name>/max`, as `geutil.quantize` has them:
the range of b bits with a zero point z is from scale * (lowest - z) to
scale * (highest - z). The variable lies on the steps of the file at first, so that the
op changes nothing before training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import TFLiteError
from geutil.graph.resource_variables import variable_outside
from geutil.model import programs
from geutil.tflite.kinds import limits, numbers_of
from geutil.tflite.numbers import dense
from geutil.tflite.parts import Array, LiteTensor, Quantization

BITS = {"int16": 16, "int2": 2, "int4": 4, "int8": 8, "uint4": 4, "uint8": 8}
"""The bits of types whose integers stand for numbers on steps."""
# Activations of 16 bits have the zero point 0 (quantization specification of TFLite).
_SYMMETRIC = 16
_FROM_STEPS = frozenset((*BITS, "int32", "int64"))
"""Types of constants with steps: those of biases are too fine to be rounded to."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant of a file, as numbers."""

    tensor: LiteTensor
    stored: LiteTensor
    dtype: tf.DType

    @property
    def steps(self) -> Quantization | None:
        """The steps of the integers that are stored; None of floats."""
        return self.stored.quantization

    @property
    def is_rounded(self) -> bool:
        """True if training has to round it to steps in the bits of a kernel."""
        return has_steps(self.stored)

    def numbers(self) -> Array:
        """Return its values as numbers."""
        value = dense(self.stored)
        if value is None:
            raise TFLiteError(f"constant '{self.tensor.name}' has no values")
        if self.steps is None:
            is_text = value.dtype == object
            return value if is_text else value.astype(self.dtype.as_numpy_dtype)
        if self.stored.dtype not in _FROM_STEPS:
            raise TFLiteError(
                f"constant '{self.tensor.name}' has steps and is of type "
                f"{self.stored.dtype}"
            )
        return numbers_of(value, self.steps)

    def lowest(self) -> int:
        """Return the lowest integer that is stored."""
        value = dense(self.stored)
        return 0 if value is None or not value.size else int(value.min())


def has_steps(tensor: LiteTensor) -> bool:
    """Tell whether the integers of a tensor are those of few bits that numbers have."""
    return bool(tensor.quantization and tensor.dtype in BITS)


def lowest_number(tensor: LiteTensor) -> float | None:
    """Return the lowest number that a tensor of one range can hold; None of others."""
    steps = tensor.quantization
    if steps is None or not has_steps(tensor) or len(steps.scales) != 1:
        return None
    return steps.scales[0] * (limits(tensor.dtype)[0] - steps.zero_points[0])


def dtype_of(tensor: LiteTensor) -> tf.DType:
    """Return the type of the numbers of a tensor."""
    if tensor.quantization is not None and tensor.dtype in _FROM_STEPS:
        return tf.float32
    if tensor.dtype in ("int2", "uint4"):
        return tf.int8
    try:
        return tf.as_dtype(tensor.dtype)
    except TypeError as error:
        raise TFLiteError(
            f"'{tensor.name}' is of type {tensor.dtype}, which TensorFlow lacks"
        ) from error


def same_steps(one: LiteTensor, other: LiteTensor) -> bool:
    """Tell whether the integers of two tensors stand for the same numbers."""
    return one.dtype == other.dtype and one.quantization == other.quantization


@dataclass(frozen=True)
class Layout:
    """The layout of weights in TensorFlow's kernels: order of axes, and shape."""

    order: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def of(self, value: Any, on: Any = tf) -> Any:
        """Return values in this layout."""
        if self.order != tuple(range(len(self.order))):
            value = on.transpose(value, self.order)
        return value if self.shape is None else on.reshape(value, self.shape)

    def back(self, value: Any, sizes: Sequence[int]) -> Any:
        """Return a tensor of this layout as the file has it."""
        if self.shape is not None:
            value = tf.reshape(value, [sizes[axis] for axis in self.order])
        inverse = tuple(int(i) for i in np.argsort(self.order))
        return Layout(inverse).of(value)

    def axes(self, axis: int) -> tuple[int, ...]:
        """Return the axes of this layout that an axis of the file's becomes."""
        place, last = self.order.index(axis), len(self.order) - 1
        # With a shape, the filters of all channels are told apart by the last two.
        if self.shape is None or len(self.shape) <= last or place < last - 1:
            return (place,)
        return (last - 1, last)


def plain(rank: int) -> Layout:
    """Return the layout of the file."""
    return Layout(tuple(range(rank)))


class Variables:
    """The variables that stand for constants, and those with ranges."""

    def __init__(self) -> None:
        self.all: dict[str, tf.Variable] = {}
        self._weights: dict[Any, tuple[tf.Variable, Layout]] = {}

    def new(self, name: str, value: Any, *, trained: bool) -> tf.Variable:
        """Return a new variable, whose name gets a number where it is taken."""
        free = programs.fresh_name(self.all, name)
        graph = tf.compat.v1.get_default_graph()
        made = variable_outside(graph, value, free, is_trained=trained)
        self.all[free] = made
        return made

    def weights(self, constant: Constant, name: str, layout: Layout) -> Any:
        """Return a constant as it is read from its variable, in a layout."""
        stored = constant.stored
        key = id(stored.buffer), stored.sizes, stored.dtype, stored.quantization
        if key not in self._weights:
            value = layout.of(constant.numbers(), np)
            self._weights[key] = self.new(name, value, trained=True), layout
        variable, own = self._weights[key]
        read = variable.value()
        return read if own == layout else layout.of(own.back(read, stored.sizes))

    def rounded(
        self,
        x: Any,
        like: Constant | LiteTensor,
        scope: str,
        layout: Layout | None = None,
    ) -> Any:
        """Return a tensor behind a FakeQuant op with the ranges of the file."""
        stored = like.stored if isinstance(like, Constant) else like
        steps, bits = stored.quantization, BITS[stored.dtype]
        if steps is None or steps.block:
            return x
        lowest, highest = limits(stored.dtype)
        scales = np.asarray(steps.scales, np.float32)
        zeros = np.asarray(steps.zero_points, np.int64)
        if (zeros < lowest).any() or (zeros > highest).any():
            raise TFLiteError(
                f"'{stored.name}' has a zero point outside {lowest} to {highest}"
            )
        # Kernels ask for weights without the lowest integer, and so do those with
        # activations of 16 bits, which have no zero point.
        narrow = (
            lowest < 0
            and not zeros.any()
            and (
                like.lowest() > lowest
                if isinstance(like, Constant)
                else bits == _SYMMETRIC
            )
        )
        low, high = scales * (lowest + narrow - zeros), scales * (highest - zeros)
        more = {"num_bits": bits, "narrow_range": bool(narrow)}
        with tf.name_scope(f"{scope}/"):
            if layout is None or scales.size == 1:
                ends = self._range(scope, low[0], high[0])
                return tf.quantization.fake_quant_with_min_max_vars(x, *ends, **more)
            axes = layout.axes(steps.axis)
            return _by_channel(x, self._range(scope, low, high), axes, more)

    def _range(self, scope: str, low: Any, high: Any) -> list[Any]:
        ends = []
        with tf.name_scope("range"):
            for end, value in (("min", low), ("max", high)):
                number = np.asarray(value, np.float32)
                made = self.new(f"{scope}/{end}", number, trained=False)
                ends.append(made.value())
        return ends


def _by_channel(x: Any, ends: Sequence[Any], axes: Sequence[int], more: Any) -> Any:
    """Return a tensor rounded in a range for each index of axes that are neighbours.

    FakeQuant ops know the last axis alone.
    """
    fake_quant = tf.quantization.fake_quant_with_min_max_vars_per_channel
    rank, sizes = x.shape.rank, x.shape.as_list()
    if axes[-1] != rank - 1:
        order = [*(i for i in range(rank) if i not in axes), *axes]
        turned = _by_channel(
            tf.transpose(x, order), ends, range(rank - len(axes), rank), more
        )
        return tf.transpose(turned, [int(i) for i in np.argsort(order)])
    if len(axes) == 1:
        return fake_quant(x, *ends, **more)
    flat = tf.reshape(x, [*sizes[: axes[0]], int(np.prod(sizes[axes[0] :]))])
    return tf.reshape(fake_quant(flat, *ends, **more), sizes)
