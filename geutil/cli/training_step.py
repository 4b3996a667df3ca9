"""A training step of a model, traced and never run, and the largest batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tensorflow as tf

from geutil.cli.files import CommandError
from geutil.gradients import (
    Budget,
    Plan,
    PlanCurve,
    Report,
    gradients,
    last_report,
    plan_curve,
)
from geutil.gradients.api import BUDGETS, plans_within_time
from geutil.graph.creation import capture
from geutil.memory import Timeline
from geutil.memory.bounds import has_solver, worst_of
from geutil.memory.executor import typical
from geutil.memory.kernels.onednn import with_onednn
from geutil.memory.step_prediction import (
    FIRST,
    BatchFit,
    Step,
    executed_step,
    fit_batch,
    held_by,
)
from geutil.model import Model
from geutil.transform import copy_with_input_replacements

if TYPE_CHECKING:
    from geutil.graph.types import Tensor

T = TypeVar("T")
MORE_TIME = (0.1, 0.2, 0.4)
"""How much longer a step may take that is planned for the largest batch."""
WAYS = 3 + len(MORE_TIME)


@dataclass(frozen=True, eq=False)
class BuiltStep:
    """A step as it would run.

    Attributes:
        fetches: its results.
        report: the report of its gradients.
    """

    fetches: tuple[Any, ...]
    report: Report

    @cached_property
    def _executed(self) -> Step:
        """The step that TensorFlow runs, found once for both predictions."""
        return executed_step(self.fetches, None, None, grappler=True)

    def timeline(self) -> Timeline:
        """Return the memory of the step, op by op, as `predict` does."""
        step = self._executed
        return step.noted(typical(step.program).timeline())

    def worst(self) -> int | None:
        """Return the most that `worst_case` says it holds; None without OR-Tools."""
        if not has_solver():
            return None
        program = self._executed.program
        return worst_of(with_onednn(program)).peak


class TrainingStep:
    """The gradients of the mean square of a model's outputs, and updates by them.

    Args:
        model: the model.
        shapes: the whole shape of each input.
        device: the device it is planned for; None is where this process runs it.

    Raises:
        CommandError: the model has nothing to train, or nothing to train by.
    """

    def __init__(
        self,
        model: Model,
        shapes: Mapping[str, list[int]],
        device: str | None = None,
    ) -> None:
        """Check that the model can be trained, and draw the inputs of one batch."""
        self._device = device
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

    def built(
        self, checkpoints: str | Budget | Plan | None, *, order: bool | None = None
    ) -> BuiltStep:
        """Build the step, with plain gradients or with checkpoints."""
        ordered = checkpoints is not None if order is None else order

        @tf.function(autograph=False)
        def trace(*inputs: Tensor) -> None:
            loss = self._loss(inputs)
            slopes = gradients(
                loss,
                self._weights,
                checkpoints=checkpoints,
                order=ordered,
                device=self._device,
            )
            for weight, slope in zip(self._weights, slopes, strict=True):
                if slope is not None:
                    # The gradient of an embedding comes as IndexedSlices.
                    dense = tf.convert_to_tensor(slope)
                    weight.assign_sub(dense, read_value=False)

        graph = trace.get_concrete_function(*self._specs).graph
        report = last_report(graph)
        return BuiltStep((*graph.outputs, *graph.control_outputs), cast(Report, report))

    def plans(self, shares: Sequence[float]) -> list[Plan]:
        """Return plans of least peak within extra times, for any batch size."""
        return self._traced(
            lambda loss: plans_within_time(loss, self._weights, shares, self._device)
        )

    def curve(self, budget: str | None) -> PlanCurve:
        """Return the curve of time against memory."""
        budgets = [*BUDGETS] if budget is None else [budget, *BUDGETS]
        return self._traced(
            lambda loss: plan_curve(loss, self._weights, budgets, device=self._device)
        )

    def _traced(self, of_loss: Callable[[Tensor], T]) -> T:
        """Return the result of a function of the loss, called while it is traced."""
        results: list[T] = []

        @tf.function(autograph=False)
        def trace(*inputs: Tensor) -> None:
            results.append(of_loss(self._loss(inputs)))

        trace.get_concrete_function(*self._specs)
        return results[0]

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


class BatchSizes:
    """The largest batches that fit into memory.

    Args:
        model: the model.
        shapes_of: returns the shapes of inputs for a batch size.
        memory: resident bytes, as the limit of a container counts them; of a GPU, what
            TensorFlow has of it.
        device: what steps are planned for; None is where this process runs them.
    """

    def __init__(
        self,
        model: Model,
        shapes_of: Callable[[int], dict[str, list[int]]],
        memory: int,
        device: str | None = None,
    ) -> None:
        self._device = device
        self._model, self._shapes_of, self._memory = model, shapes_of, memory

    def fits(self) -> Iterator[tuple[str, BatchFit]]:
        """Yield each way of taking gradients with its largest batch.

        The result of each is where the search for the next one begins.
        """
        plain, _ = self._fit(None, order=False)
        yield "plain", plain
        ordered, _ = self._fit(None, order=True, first=plain.batch)
        yield "order alone", ordered
        saving, saving_time = self._fit("memory", order=True, first=ordered.batch)
        yield "checkpoints", saving
        if not has_solver():
            return
        first = max(ordered.batch, saving.batch, 1)
        best = ordered
        # An empty plan is ordering alone, whose batch is known.
        met: set[Any] = {((), ())}
        plans = self._step(first).plans(MORE_TIME)
        for share, plan in zip(MORE_TIME, plans, strict=True):
            found = [best]
            choice = plan.bursts, plan.loops
            if choice not in met:
                found.append(self._fit(plan, order=True, first=first)[0])
            met.add(choice)
            # Checkpoints may win where they take no more time than the plan.
            if saving_time <= share:
                found.append(saving)
            best = max(found, key=lambda fit: fit.batch)
            yield f"a plan, {share:.0%} more time", best

    def _fit(
        self, checkpoints: str | Plan | None, *, order: bool, first: int = 0
    ) -> tuple[BatchFit, float]:
        """Return the largest batch, and the extra time of its step."""
        times: dict[int, float] = {}

        def held(rows: int) -> Any:
            built = self._step(rows).built(checkpoints, order=order)
            times[rows] = built.report.extra_time
            return held_by(built.timeline(), resident=True)

        fit = fit_batch(held, self._memory, first=first or FIRST)
        return fit, times.get(fit.batch, 0.0)

    def _step(self, rows: int) -> TrainingStep:
        return TrainingStep(self._model, self._shapes_of(rows), self._device)
