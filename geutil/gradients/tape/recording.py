"""The ops of a graph as entries of a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import TapeError
from geutil.gradients.tape.identifiers import tensor_id
from geutil.graph.function_graphs import bindings
from geutil.graph.gradient_registry import gradient_function, has_gradient
from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.graph.order import topological_sort
from geutil.graph.plain_gradients import in_version_1_control_flow, variable_tensor
from geutil.select.walks import get_backward_walk_ops

_LOOPS = frozenset(("While", "StatelessWhile"))
Fields = tuple[str, tuple[int, ...], tuple[Any, ...], tuple[int, ...], Any]


def record_graph(ys: Sequence[Tensor], xs: Sequence[Any]) -> Iterator[Fields]:
    """Yield the fields of an entry for each op between some tensors, in order.

    Args:
        ys: the tensors that will be differentiated.
        xs: tensors and variables to differentiate by.

    Raises:
        ArgumentTypeError: a y is no tensor of a graph.
        TapeError: an op is in a loop or conditional of version 1.

    Cost: linear in the ops behind `ys` and their edges.
    """
    for y in ys:
        require_tensor(y)
    if not ys:
        return
    graph = ys[0].graph
    sources = (tensor_of(graph, x) for x in xs)
    reached = {tensor_id(t) for t in sources if t is not None}
    behind = get_backward_walk_ops([y.op for y in ys])
    for op in topological_sort(behind):
        if not any(tensor_id(t) in reached for t in op.inputs):
            continue
        if in_version_1_control_flow(op):
            raise TapeError(
                f"'{op.name}' ({op.type}) is in a loop or conditional of version 1, "
                "whose gradient a tape cannot hold; use tf.gradients, or control flow "
                "v2 (tf.compat.v1.enable_control_flow_v2)"
            )
        reached.update(map(tensor_id, op.outputs))
        yield _fields(op)


def tensor_of(graph: Graph, x: Any) -> Tensor | None:
    """Return the tensor of a graph that stands for a tensor or variable, or None.

    A FuncGraph reads what is outside by captures.
    """
    if not isinstance(x, tf.Tensor):
        return variable_tensor(graph, x)
    if getattr(x, "graph", None) is graph:
        return x
    return next((inside for outside, inside in bindings(graph) if outside is x), None)


def _fields(op: Operation) -> Fields:
    inputs, outputs = list(op.inputs), list(op.outputs)
    return (
        op.type,
        tuple(map(tensor_id, outputs)),
        tuple(_kind(t, len(outputs)) for t in outputs),
        tuple(map(tensor_id, inputs)),
        OpGradient(op, len(inputs)),
    )


def _kind(tensor: Tensor, outputs: int) -> tuple[Any, Any] | None:
    """Return the shape and dtype to make zeros of; None where none are wanted."""
    if not has_gradient(tensor):
        return None
    if tensor.dtype == tf.variant:
        # A list of tensors: zeros for all of them are made of the list.
        return tensor, tensor.dtype
    shape = tensor.shape
    # Of a single output there is always a gradient.
    if outputs > 1 and not shape.is_fully_defined():
        with tensor.graph.as_default():
            shape = tf.shape(tensor)
    return shape, tensor.dtype


class OpGradient:
    """The backward function of an op of a graph, which builds ops beside it.

    Args:
        op: the op.
        inputs: how many inputs it had when it was recorded: differentiating a loop
            adds some.

    Attributes:
        op_name: the name of the op.
    """

    def __init__(self, op: Operation, inputs: int) -> None:
        self.op_name: str = op.name
        self._op = op
        self._inputs = inputs

    def __call__(self, *gradients: Any) -> list[Any]:
        """Return the gradients of the inputs."""
        op = self._op
        function = self._function()
        if function is None:
            return [None] * self._inputs
        with op.graph.as_default(), tf.device(op.device or None):
            found = function(op, *gradients)
        listed = list(found) if isinstance(found, list | tuple) else [found]
        return listed[: self._inputs] if op.type in _LOOPS else listed

    def _function(self) -> Callable[..., Any] | None:
        try:
            return gradient_function(self._op)
        except LookupError as error:
            raise TapeError(
                f"TensorFlow has no gradient for '{self.op_name}' ({self._op.type}); "
                "stop in front of it with tf.stop_gradient, or register one with "
                "tf.RegisterGradient"
            ) from error
