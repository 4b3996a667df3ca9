"""What another process needs in order to run a function: its arguments and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.graph._tf import IsMklEnabled, TraceLiteral, canonicalize_function_inputs
from geutil.graph.handles import dtype_behind
from geutil.graph.kinds import Tensor


def bound_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[tuple[Any, Tensor]]:
    """Return (outside tensor, placeholder) for each argument and capture of a call.

    Args:
        function: a ConcreteFunction.
        args: what it would be called with, by position.
        kwargs: and by keyword.
        traced_from: the `tf.function` that it is a trace of, which knows the defaults;
            else None.

    Raises:
        TypeError: the arguments do not fit the function.
    """
    captured = list(function.captured_inputs)
    inputs = list(function.inputs)
    if function.function_type is None:
        values = [tf.convert_to_tensor(value) for value in args]
    else:
        values = _canonical(function.function_type, args, kwargs, traced_from)
    wanted = len(inputs) - len(captured)
    if len(values) != wanted:
        raise TypeError(f"{len(values)} values for {wanted} tensor arguments")
    return list(zip([*values, *captured], inputs, strict=True))


def _canonical(
    kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> list[Tensor]:
    """Return the tensors that a call passes to a trace of some type."""
    asked, defaults = kind, None
    if traced_from is not None:
        asked, defaults = traced_from.function_type, traced_from._default_values
    else:
        kwargs = {**_fixed(kind, args, kwargs), **kwargs}
    bound = canonicalize_function_inputs(tuple(args), dict(kwargs), asked, defaults)
    # A trace has a parameter for each value that `*args` takes.
    bound = kind.bind(*bound.args, **bound.kwargs)
    return list(kind.unpack_inputs(bound))


def _fixed(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Python that a trace was made for and a call leaves out."""
    given = kind.bind_partial(*args, **kwargs).arguments
    return {
        name: parameter.type_constraint.value
        for name, parameter in kind.parameters.items()
        if name not in given and isinstance(parameter.type_constraint, TraceLiteral)
    }


def is_compiled(function: Any) -> bool:
    """Tell whether a ConcreteFunction is compiled by XLA when it is called."""
    attributes = function.function_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def value_behind(handle: Any) -> Any:
    """Return the value of the variable that an eager handle leads to, as an array.

    None if it leads to no variable, but to a table or the like.

    Raises:
        tf.errors.FailedPreconditionError: the variable has no value yet.
    """
    dtype = dtype_behind(handle)
    if dtype is None:
        return None
    with tf.init_scope():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def uses_onednn() -> bool:
    """Tell whether TensorFlow uses oneDNN, and with it the allocator that counts."""
    return bool(IsMklEnabled())
