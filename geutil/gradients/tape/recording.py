"""The ops of a graph as entries of a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import TapeError
from geutil.gradients.tape.captured import Captured
from geutil.gradients.tape.identifiers import tensor_id
from geutil.graph.gradient_registry import (
    default_gradient_kind,
    gradient_function,
    has_gradient,
    is_symbolic_call,
)
from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.graph.op_types import LOOPS
from geutil.graph.plain_gradients import in_version_1_control_flow

Fields = tuple[str, tuple[int, ...], tuple[Any, ...], tuple[int, ...], Any]


def record_graph(ys: Sequence[Tensor], xs: Sequence[Any]) -> Iterator[Fields]:
    """Yield the fields of an entry for each op between some tensors, in order.

    What a function's graph captured counts as what it captured: ops of the graphs
    around it are between `ys` and `xs`, too.

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
    captured = Captured()
    reached = set(_ids(t for x in xs if (t := captured.source(x)) is not None))
    for op in _behind(map(captured.beyond, ys), captured):
        inputs = [captured.beyond(t) for t in op.inputs]
        if reached.isdisjoint(_ids(inputs)):
            continue
        if in_version_1_control_flow(op):
            raise TapeError(
                f"'{op.name}' ({op.type}) is in a loop or conditional of version 1, "
                "whose gradient a tape cannot hold; use tf.gradients, or control flow "
                "v2 (tf.compat.v1.enable_control_flow_v2)"
            )
        reached.update(_ids(t for t in op.outputs if has_gradient(t)))
        yield _fields(op, inputs, ys[0].graph)


def _ids(tensors: Iterable[Any]) -> Iterator[int]:
    return map(tensor_id, tensors)


def _behind(ends: Iterable[Any], captured: Captured) -> list[Operation]:
    """Return the ops that tensors depend on, each after those that it depends on."""
    stack = [t.op for t in ends if hasattr(t, "graph")]
    entered: set[Operation] = set()
    order: dict[Operation, None] = {}
    while stack:
        op = stack[-1]
        if op in entered:
            order[stack.pop()] = None
            continue
        entered.add(op)
        inputs = (captured.beyond(t) for t in op.inputs)
        stack += [t.op for t in inputs if hasattr(t, "graph") and t.op not in entered]
    return list(order)


def _fields(op: Operation, inputs: Sequence[Any], graph: Graph) -> Fields:
    outputs = list(op.outputs)
    symbolic = is_symbolic_call(op)
    return (
        op.type,
        tuple(_ids(outputs)),
        tuple(
            _kind(t) if symbolic or default_gradient_kind(t) is not None else None
            for t in outputs
        ),
        tuple(_ids(inputs)),
        OpGradient(op, len(inputs), graph),
    )


def _kind(tensor: Tensor) -> tuple[Any, Any]:
    """Return the shape and dtype to make zeros of.

    A tensor stands for its shape if that is not known.
    """
    shape, dtype = default_gradient_kind(tensor) or (tensor.shape, tensor.dtype)
    known = shape.is_fully_defined() and dtype != tf.variant
    return (shape if known else tensor), dtype


class OpGradient:
    """The backward function of an op of a graph, which builds ops.

    Args:
        op: the op.
        inputs: how many inputs it had when it was recorded: differentiating a loop
            adds some.
        graph: where the ops are built.

    Attributes:
        op_name: the name of the op.
    """

    def __init__(self, op: Operation, inputs: int, graph: Graph) -> None:
        self.op_name: str = op.name
        self._op, self._inputs, self._graph = op, inputs, graph

    def __call__(self, *gradients: Any) -> list[Any]:
        """Return the gradients of the inputs."""
        op = self._op
        function = self._function()
        if function is None:
            return [None] * self._inputs
        with (
            self._graph.as_default(),
            tf.device(op.device or None),
            tf.name_scope(f"{op.name}_grad"),
        ):
            found = function(op, *gradients)
        listed = list(found) if isinstance(found, list | tuple) else [found]
        listed = listed[: self._inputs] if op.type in LOOPS else listed
        self._tell_shapes(listed)
        return listed

    def _function(self) -> Callable[..., Any] | None:
        try:
            return gradient_function(self._op)
        except LookupError as error:
            raise TapeError(
                f"TensorFlow has no gradient for '{self.op_name}' ({self._op.type}); "
                "stop in front of it with tf.stop_gradient, or register one with "
                "tf.RegisterGradient"
            ) from error

    def _tell_shapes(self, gradients: Sequence[Any]) -> None:
        """Let gradients have the static shapes of what they are the gradients of."""
        for t, gradient in zip(self._op.inputs, gradients, strict=False):
            if not isinstance(gradient, tf.Tensor) or t.dtype == tf.resource:
                continue
            try:
                gradient.set_shape(t.shape)
            except ValueError as error:
                raise TapeError(
                    f"the gradient of '{self.op_name}' ({self._op.type}) by '{t.name}' "
                    f"has shape {gradient.shape}, and that has shape {t.shape}"
                ) from error
