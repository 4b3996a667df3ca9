"""Arithmetic of sizes in a file: the small integers that ops compute of shapes.

A converter leaves `tf.shape(x)[0] * 4` in a file as ops, where a size is free. Arrays
here hold Python's numbers, and None for those that are not known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from geutil.tflite.parts import Array
from geutil.tflite.shapes import Case, Shape, Unknown, places_of_slice, volume

_MOST = 256
"""Arrays of more numbers list no sizes: a shape has at most eight."""

Fold = Callable[[Case, Shape], Array]


def _each(function: Callable[..., Any]) -> Fold:
    """Return the fold of a function of numbers."""

    def known(*numbers: Any) -> Any:
        return None if None in numbers else function(*numbers)

    def fold(case: Case, shape: Shape) -> Array:
        numbers = [case.entries(i) for i in range(len(case.shapes))]
        made: Array = np.asarray(
            np.frompyfunc(known, len(numbers), 1)(*numbers), object
        )
        return made

    return fold


def _reshaped(case: Case, shape: Shape) -> Array:
    if shape is None or None in shape:
        raise Unknown
    return case.entries(0).reshape(shape)


def _strided_slice(case: Case, shape: Shape) -> Array:
    value, places = case.entries(0), places_of_slice(case)
    if places is None:
        raise Unknown
    taken: list[Any] = []
    for word, _, bounds in places:
        single = bounds.start or 0
        taken.append({"new": None, "shrink": single, "keep": bounds}[word])
    return np.asarray(value[tuple(taken)], object)


def _slice(case: Case, shape: Shape) -> Array:
    if shape is None or None in shape or None in case.sizes(1):
        raise Unknown
    begins = (b or 0 for b in case.sizes(1))
    taken = (slice(b, b + (n or 0)) for b, n in zip(begins, shape, strict=True))
    return case.entries(0)[tuple(taken)]


def _gather(case: Case, shape: Shape) -> Array:
    if case.option("batch_dims"):
        raise Unknown
    indices = case.value(1).astype(np.int64)
    return np.asarray(np.take(case.entries(0), indices, case.option("axis")), object)


def _filled(case: Case, shape: Shape) -> Array:
    count = None if shape is None else volume(shape)
    if count is None or count > _MOST:
        raise Unknown
    filled = [case.entries(1).reshape(-1)[0]] * count
    return np.asarray(filled, object).reshape(shape or ())


def _range(case: Case, shape: Shape) -> Array:
    first, last, step = (case.value(i).reshape(-1)[0] for i in range(3))
    if None in (first, last, step) or abs((last - first) / step) > _MOST:
        raise Unknown
    return np.arange(first, last, step).astype(object)


def _joined(function: Callable[..., Any]) -> Fold:
    """Return the fold of a function that joins all inputs along an axis."""
    return lambda case, shape: function(
        [case.entries(i) for i in range(len(case.shapes))], case.option("axis")
    )


def _product(case: Case, shape: Shape) -> Array:
    axes = tuple(case.value(1).reshape(-1).astype(int).tolist())
    made = np.prod(case.value(0), axis=axes, keepdims=bool(case.option("keep_dims")))
    return np.asarray(made, object)


def _cast(case: Case, shape: Shape) -> Array:
    is_float = case.op.outputs[0].dtype.startswith("float")
    return _each(float if is_float else int)(case, shape)


FOLDS: Mapping[str, Fold] = {
    "ADD": _each(operator.add),
    "CAST": _cast,
    "CONCATENATION": _joined(np.concatenate),
    "DIV": _each(lambda a, b: int(a / b) if isinstance(a, int) else a / b),
    "EXPAND_DIMS": _reshaped,
    "FILL": _filled,
    "FLOOR": _each(lambda a: float(a // 1)),
    "FLOOR_DIV": _each(operator.floordiv),
    "FLOOR_MOD": _each(operator.mod),
    "GATHER": _gather,
    "MAXIMUM": _each(max),
    "MINIMUM": _each(min),
    "MUL": _each(operator.mul),
    "NEG": _each(operator.neg),
    "PACK": _joined(np.stack),
    "RANGE": _range,
    "RANK": lambda case, shape: np.asarray(len(case.shape(0)), object),
    "REDUCE_PROD": _product,
    "RESHAPE": _reshaped,
    "SHAPE": lambda case, shape: np.asarray(case.shape(0), object),
    "SLICE": _slice,
    "SQUEEZE": _reshaped,
    "STRIDED_SLICE": _strided_slice,
    "SUB": _each(operator.sub),
}
"""Kinds of ops that compute sizes, and the arrays that they make."""


def computed(case: Case, shape: Shape) -> Array | None:
    """Return the sizes that an op computes; None if it computes something else."""
    fold = FOLDS.get(case.op.kind)
    if fold is None or case.op.is_custom or len(case.op.outputs) != 1:
        return None
    try:
        made = fold(case, shape)
    except (Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return made if made.size <= _MOST else None


def listed(value: Array | None) -> Array | None:
    """Return a constant as an array of numbers; None of one that lists no sizes."""
    if value is None or value.size > _MOST or value.dtype.kind not in "if":
        return None
    return value.astype(object)
