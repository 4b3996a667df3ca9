"""The process-wide registry of gradient functions, and ops that name an entry of it.

`tf.custom_gradient` in a graph registers a Python closure under a name made up on the
spot and writes that name into the `_gradient_op_type` attribute of an IdentityN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from geutil.graph._tf import (
    FuncGraph,
    IsTrainable,
    get_gradient_function,
    gradient_registry,
    shape_and_dtype,
    supports_default_grad,
    symbolic_gradient,
)
from geutil.graph.op_types import CALLS
from geutil.graph.protos import AttrValue

ATTRIBUTE = "_gradient_op_type"
_CLOSURES = ("CustomGradient-", "GeutilCustomGradient-")
_numbers = itertools.count()


def is_closure(gradient_type: str) -> bool:
    """Tell whether a gradient name stands for a closure over tensors of one graph."""
    return gradient_type.startswith(_CLOSURES) and gradient_type in registered_names()


def registered_names() -> Any:
    """Return the names in the registry."""
    return gradient_registry.list()


def lookup(gradient_type: str) -> Callable[..., Any]:
    """Return the gradient function of that name."""
    function: Callable[..., Any] = gradient_registry.lookup(gradient_type)
    return function


def register(function: Callable[..., Any]) -> str:
    """Register a gradient function and return the name made for it."""
    name = f"{_CLOSURES[1]}{next(_numbers)}"
    tf.RegisterGradient(name)(function)
    return name


def new_body(name: str) -> Any:
    """Return an empty FuncGraph, to trace a gradient function in."""
    return FuncGraph(name)


def captures_of(body: Any) -> list[tuple[Any, Any]]:
    """Return (outside tensor, placeholder inside) for each capture of a FuncGraph."""
    return list(body.captures)


def gradient_of(op: Any) -> str | None:
    """Return the name of the gradient that an op names, None where it names none."""
    try:
        value: bytes = op.get_attr(ATTRIBUTE)
    except ValueError:
        return None
    return value.decode()


def set_gradient(op: Any, name: str) -> None:
    """Make an op name a gradient of the registry."""
    op._set_attr(ATTRIBUTE, AttrValue(s=name.encode()))


def gradient_function(op: Any) -> Callable[..., Any] | None:
    """Return the gradient function of an op; None if its gradient is nothing.

    Raises:
        LookupError: none is registered.
    """
    if is_symbolic_call(op):
        return _symbolic_gradient
    function: Callable[..., Any] | None = get_gradient_function(op)
    return function


def is_symbolic_call(op: Any) -> bool:
    """Tell whether an op calls a function that no gradient is registered for.

    So it is once a graph was imported. TensorFlow differentiates the function when it
    runs.
    """
    called = op.type in CALLS or op.graph._is_function(op.type)
    if not called:
        return False
    try:
        get_gradient_function(op)
    except LookupError:
        return True
    return False


def _symbolic_gradient(op: Any, *gradients: Any) -> list[Any]:
    found: list[Any] = symbolic_gradient(op, list(gradients))
    return found


def has_gradient(tensor: Any) -> bool:
    """Tell whether TensorFlow differentiates a tensor: floats, and lists of them."""
    return bool(IsTrainable(tensor))


def default_gradient_kind(tensor: Any) -> tuple[Any, Any] | None:
    """Return the shape and dtype of the gradient of a tensor; None if it has none.

    Of a variable's handle they are those of the variable, if they are known.
    """
    if not has_gradient(tensor) or not supports_default_grad(tensor):
        return None
    kind: tuple[Any, Any] = shape_and_dtype(tensor)
    return kind
