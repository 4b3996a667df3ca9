"""Calling models with named arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from geutil.graph.function_graphs import call_function
from geutil.graph.kinds import Tensor
from geutil.graph.trainable import is_trainable
from geutil.model.errors import ModelError


def checked_arguments(
    inputs: Mapping[str, Tensor], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments as tensors of the right dtype.

    Raises:
        ModelError: a name is unknown or missing, or a value does not fit.
    """
    known = list(inputs)
    for name in given:
        if name not in inputs:
            raise ModelError(f"there is no input '{name}'; the inputs are {known}")
    missing = [name for name in known if name not in given]
    if missing:
        raise ModelError(f"inputs {missing} are missing; the inputs are {known}")
    return {name: _fitting(name, t, given[name]) for name, t in inputs.items()}


def _fitting(name: str, t: Tensor, value: Any) -> Any:
    try:
        tensor = tf.convert_to_tensor(value, t.dtype)
    except (TypeError, ValueError, tf.errors.OpError):
        tensor = None
    if tensor is None or not t.shape.is_compatible_with(tensor.shape):
        found = tensor if tensor is not None else value
        shape = getattr(found, "shape", None)
        raise ModelError(
            f"input '{name}' is {t.dtype.name} of shape {t.shape}, and got "
            f"{type(value).__name__} "
            f"({getattr(getattr(found, 'dtype', None), 'name', 'no dtype')}, shape "
            f"{shape}); convert it first"
        )
    return tensor


class ModelFunction:
    """A model as a callable: in eager code, inside `tf.function`, under a tape.

    It computes what the model's graph was when the function was made.

    Args:
        function: the concrete function.
        inputs: the inputs of the model.
        outputs: the names of the outputs, in order.

    Attributes:
        concrete_function: the `tf.types.experimental.ConcreteFunction`.
        variables: the variables that it reads.
        trainable_variables: those of them that are trained.
    """

    def __init__(
        self, function: Any, inputs: Mapping[str, Tensor], outputs: tuple[str, ...]
    ) -> None:
        self.concrete_function = function
        self._inputs = dict(inputs)
        self._outputs = outputs

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables that the function reads."""
        return tuple(self.concrete_function.variables)

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """Those of them that are trained."""
        return tuple(v for v in self.variables if is_trainable(v))

    def __call__(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs.

        Args:
            *args: values of the first inputs, in their order.
            **kwargs: values of the other inputs, by name.

        Returns:
            The outputs by name, as tensors.

        Raises:
            ModelError: an input is missing, unknown, given twice, or does not fit; or a
                tape watches the call and the model has a loop of version 1.
        """
        names = list(self._inputs)
        if len(args) > len(names):
            raise ModelError(f"{len(args)} values for {len(names)} inputs: {names}")
        given = dict(zip(names, args, strict=False))
        twice = [name for name in kwargs if name in given]
        if twice:
            raise ModelError(f"inputs {twice} are given by position and by name")
        arguments = checked_arguments(self._inputs, {**given, **kwargs})
        try:
            results = call_function(self.concrete_function, arguments)
        except AttributeError as error:
            # A tape that watches the call looks for what Python knows of the loops.
            for op in self.concrete_function.graph.get_operations():
                if op.type == "Exit":
                    raise ModelError(
                        f"a tape cannot differentiate the loop of version 1 at "
                        f"'{op.name}'; call the model outside the tape, or cut the "
                        "loop off with model.cut"
                    ) from error
            raise
        return {name: results[name] for name in self._outputs}

    def __repr__(self) -> str:
        return f"ModelFunction({list(self._inputs)} -> {list(self._outputs)})"
