"""The largest batch of a model's training step in each way of taking gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from geutil.cli.training_step import TrainingStep
from geutil.gradients import Plan
from geutil.memory.bounds import has_solver
from geutil.memory.step_prediction import FIRST, BatchFit, fit_batch, held_by
from geutil.model import Model

MORE_TIME = (0.1, 0.2, 0.4)
"""How much longer a step may take that is planned for the largest batch."""
WAYS = 3 + len(MORE_TIME)


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

        Raises:
            CommandError: as `TrainingStep`.

        Cost: two to five predicted steps for each, and one search of plans.
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
        met: set[Any] = {((), ())}
        plans = self._step(first).plans(MORE_TIME)
        for share, plan in zip(MORE_TIME, plans, strict=True):
            found = [best]
            choice = plan.bursts, plan.loops
            if choice not in met:
                found.append(self._fit(plan, order=True, first=first)[0])
            met.add(choice)
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
