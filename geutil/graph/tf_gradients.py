"""TensorFlow's own gradients and tapes, whatever name somebody has patched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from geutil.graph import _tf, adjacency
from geutil.graph._tf import AutographStatus, IsTrainable
from geutil.graph.types import Graph, Operation, Tensor

F = TypeVar("F", bound=Callable[..., Any])
Backward = Callable[..., Sequence[Any]]


def a_tape_is_open() -> bool:
    """Tell whether a tape of this thread may record what happens now."""
    return bool(_tf.could_possibly_record())


def is_watched(tensor: Any) -> bool:
    """Tell whether a tape would record an op that reads `tensor`."""
    return bool(_tf.should_record_backprop([tensor]))


def is_differentiable(tensor: Tensor) -> bool:
    """Tell whether gradients flow through tensors of this dtype at all.

    They do through handles of variables.
    """
    return bool(IsTrainable(tensor))


def without_recording(make: Callable[[], Any]) -> Any:
    """Return what `make` returns; no tape sees what it does."""
    with _tf.stop_recording():
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
    _tf.record_operation(name, list(outputs), list(inputs), backward)


def set_gradient(op: Operation, gradient: Backward) -> None:
    """Make `gradient(op, *output_gradients)` the gradient of an op."""
    op._gradient_function = gradient


def carry_marks(tensor: Tensor, tensor_: Tensor) -> None:
    """Put on a stand-in what Python alone knows of a tensor: handle data, a mask."""
    _tf.copy_handle_data(tensor, tensor_)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        tensor_._keras_mask = mask


def not_converted(function: F) -> F:
    """Mark a function that autograph calls as it is, but within its own status.

    Unlike `tf.autograph.experimental.do_not_convert`, this leaves it to the function
    whether what it calls is converted.
    """
    marked: F = _tf.autograph_artifact(function)
    return marked


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as autograph would call it at this place."""
    context = _tf.control_status_ctx()
    if context.status is not AutographStatus.ENABLED:
        return function
    converted: Callable[..., Any] = _tf.tf_convert(function, context)
    return converted


def plain_gradients(
    graph: Graph,
    ys: Sequence[Any],
    xs: Sequence[Any],
    grad_ys: Sequence[Any],
    options: Mapping[str, Any],
) -> list[Any]:
    """Return what `tf.gradients` returns, even where that name has been replaced.

    Args:
        graph: the graph of `ys`, which must be the default graph.
        ys: tensors.
        xs: tensors and variables.
        grad_ys: the gradient of each y, or None.
        options: further arguments of `tf.gradients` and of `tf.compat.v1.gradients`.
    """
    arguments = {"colocate_gradients_with_ops": True, **options}
    # The gradient of control flow changes forward ops; no Session may run meanwhile.
    with graph._mutation_lock():
        gradients: list[Any] = _tf.gradients_helper(
            list(ys), list(xs), list(grad_ys), **arguments
        )
    return gradients


_FLOW = ("WhileContext", "CondContext")


def default_gradients(ys: Sequence[Any], grad_ys: Sequence[Any]) -> list[Any]:
    """Return the gradients of `ys` to start with: ones where None is given.

    Raises:
        TypeError: one is of a wrong type, or there is no default one, as for complex
            numbers.
    """
    seeds: list[Any] = _tf.default_grad_ys(list(grad_ys), list(ys), True)
    return seeds


def in_version_1_control_flow(op: Operation) -> bool:
    """Tell whether `op` runs in a loop or a conditional of version 1.

    A context that only marks what XLA compiles does not count.
    """
    context = adjacency.control_flow_context(op)
    while context is not None:
        if type(context).__name__ in _FLOW:
            return True
        context = context.outer_context
    return False


def is_stateful(op: Operation) -> bool:
    """Tell whether running `op` twice may not be the same as running it once."""
    definition = op.op_def
    return definition is None or bool(definition.is_stateful)


def collection(graph: Graph, name: str) -> Iterable[Any]:
    """Return what a collection of `graph` holds."""
    held: list[Any] = graph.get_collection(name)
    return held


def variable_tensor(graph: Graph, variable: Any) -> Any:
    """Return the tensor of `graph` that stands for a variable, or None.

    That is its handle, what a FuncGraph captured the handle as, or, for a version 1
    variable without a handle, the reference to it.
    """
    handle = variable_handle(variable)
    if getattr(handle, "graph", None) is graph:
        return handle
    captures = getattr(graph, "captures", ())
    return next((inside for outside, inside in captures if outside is handle), None)


def variable_handle(variable: Any) -> Any:
    """Return the handle of a variable, or the reference to one without a handle."""
    handle = getattr(variable, "handle", None)
    return variable._ref() if handle is None else handle


def enclosing_graphs(graph: Graph) -> list[Graph]:
    """Return the graphs that the body of a function was traced in, inner ones first."""
    found = []
    outer = getattr(graph, "outer_graph", None)
    while outer is not None:
        found.append(outer)
        outer = getattr(outer, "outer_graph", None)
    return found
