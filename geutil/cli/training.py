"""A training step of a model, for predictions: traced, never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from geutil.cli.files import CommandError
from geutil.gradients import Report, explain, gradients
from geutil.graph.importing import capture
from geutil.memory import Timeline, predict
from geutil.model import Model
from geutil.transform import copy_with_input_replacements

if TYPE_CHECKING:
    from geutil.graph.kinds import Tensor

T = TypeVar("T")


class TrainingStep:
    """The gradients of the mean square of a model's outputs, and updates by them.

    Args:
        model: the model.
        shapes: the whole shape of each input.

    Raises:
        CommandError: the model has nothing to train, or nothing to train by.
    """

    def __init__(self, model: Model, shapes: Mapping[str, list[int]]) -> None:
        self._weights = [v for v in model.variables.values() if v.trainable]
        if not self._weights:
            raise CommandError(
                "the model has no variables to train: it is frozen; give the one that "
                "it was frozen from"
            )
        if not any(t.dtype.is_floating for t in model.outputs.values()):
            raise CommandError("the model has no floating output to train by")
        self._function = model.to_function().concrete_function
        self._specs = [
            tf.TensorSpec(shapes[name], t.dtype) for name, t in model.inputs.items()
        ]

    def plan(self) -> Report:
        """Return what checkpoints would keep, and what would run again."""
        return self._traced(lambda loss: explain(loss, self._weights))

    def timeline(self, checkpoints: str | None) -> Timeline:
        """Return what the step holds, op by op, with plain gradients or checkpoints."""

        def predicted(loss: Tensor) -> Timeline:
            slopes = gradients(loss, self._weights, checkpoints=checkpoints)
            updates = [
                weight.assign_sub(tf.convert_to_tensor(slope), read_value=False)
                for weight, slope in zip(self._weights, slopes, strict=True)
                if slope is not None
            ]
            return predict(updates)

        return self._traced(predicted)

    def _traced(self, build: Callable[[Tensor], T]) -> T:
        """Call a function of the loss while a `tf.function` is traced."""
        made: list[T] = []

        @tf.function(autograph=False)
        def trace(*inputs: Tensor) -> None:
            made.append(build(self._loss(inputs)))

        trace.get_concrete_function(*self._specs)
        return made[0]

    def _loss(self, inputs: tuple[Tensor, ...]) -> Tensor:
        results = [r for r in self._inlined(inputs) if r.dtype.is_floating]
        squares = [tf.reduce_mean(tf.square(tf.cast(r, tf.float32))) for r in results]
        return tf.add_n(squares)

    def _inlined(self, inputs: tuple[Tensor, ...]) -> list[Any]:
        """Return the outputs, computed by the model's own ops in the traced graph.

        Inside a call there is nothing that gradients could recompute.
        """
        inner, graph = self._function.graph, tf.compat.v1.get_default_graph()
        captured = [capture(graph, t) for t in self._function.captured_inputs]
        placeholders = {placeholder.op.name for placeholder in inner.inputs}
        _, info = copy_with_input_replacements(
            [op for op in inner.get_operations() if op.name not in placeholders],
            list(zip(inner.inputs, [*inputs, *captured], strict=True)),
            dst_graph=graph,
        )
        return [info.transformed(output) for output in inner.outputs]
