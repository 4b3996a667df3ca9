"""What gradient tapes are told, and what autograph is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from geutil.graph._tf import (
    AutographStatus,
    IsTrainable,
    autograph_artifact,
    control_status_ctx,
    copy_handle_data,
    could_possibly_record,
    record_operation,
    should_record_backprop,
    stop_recording,
    tf_convert,
)
from geutil.graph.kinds import Operation, Tensor

F = TypeVar("F", bound=Callable[..., Any])
Backward = Callable[..., Sequence[Any]]


def a_tape_is_open() -> bool:
    """Tell whether a tape of this thread may record what happens now."""
    return bool(could_possibly_record())


def is_watched(tensor: Any) -> bool:
    """Tell whether a tape would record an op that reads `tensor`."""
    return bool(should_record_backprop([tensor]))


def is_differentiable(tensor: Tensor) -> bool:
    """Tell whether gradients flow through tensors of this dtype at all.

    They do through handles of variables.
    """
    return bool(IsTrainable(tensor))


def without_recording(make: Callable[[], Any]) -> Any:
    """Return what `make` returns; no tape sees what it does."""
    with stop_recording():
        return make()


def record_on_tapes(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Any], backward: Backward
) -> None:
    """Tell all open tapes that an op has made `outputs` of `inputs`.

    Args:
        name: what the op is called in messages.
        outputs: tensors; what a tape knows of their origin is replaced.
        inputs: tensors.
        backward: takes the gradient of each output, returns that of each input.
    """
    record_operation(name, list(outputs), list(inputs), backward)


def set_gradient(op: Operation, gradient: Backward) -> None:
    """Make `gradient(op, *output_gradients)` the gradient of an op."""
    op._gradient_function = gradient


def carry_marks(tensor: Tensor, tensor_: Tensor) -> None:
    """Put on a stand-in what Python alone knows of a tensor: handle data, a mask."""
    copy_handle_data(tensor, tensor_)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        tensor_._keras_mask = mask


def not_converted(function: F) -> F:
    """Mark a function that autograph calls as it is, but within its own status.

    Unlike `tf.autograph.experimental.do_not_convert`, this leaves it to the function
    whether what it calls is converted.
    """
    marked: F = autograph_artifact(function)
    return marked


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as autograph would call it at this place."""
    context = control_status_ctx()
    if context.status is not AutographStatus.ENABLED:
        return function
    converted: Callable[..., Any] = tf_convert(function, context)
    return converted
