"""Trying a choice out: the peak of a step that recomputes by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geutil.gradients.costs import multiply_adds
from geutil.gradients.planning.threads import peak_of_two_threads
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps, Segment, plan_recomputation
from geutil.gradients.step import Step
from geutil.graph.kinds import Operation, Tensor
from geutil.memory.simulation import simulate


@dataclass(frozen=True, eq=False)
class Trial:
    """A choice and what it leads to.

    Attributes:
        kept: the tensors.
        peak: the predicted peak in bytes, with one thread.
        worst: the larger one of the peaks with one and with two threads; at least
            that with one, where that is too much already.
        cost: the multiply-adds that are done again.
    """

    kept: tuple[Tensor, ...]
    peak: int
    worst: int
    cost: int


class Trials:
    """Simulates choices of kept tensors for one step.

    Args:
        step: the step.
        always: tells which tensors are kept whatever is chosen.
    """

    def __init__(self, step: Step, always: Keeps) -> None:
        self._step = step
        self._always = always
        self._known: dict[int, bool] = {}
        self._costs: dict[Operation, int] = {}
        self.program = StepProgram(step)

    def plain(self) -> Trial:
        """Return what plain gradients lead to."""
        return self._trial((), (), math.inf)

    def run(self, kept: Iterable[Tensor], enough: float = math.inf) -> Trial:
        """Return what a choice leads to.

        Args:
            kept: the choice.
            enough: a peak from which on it does not matter any more.

        Cost: linear in the ops of the step and their edges; some 20 us for each op.
        """
        chosen = tuple(kept)
        ids = frozenset(map(id, chosen))
        plan = plan_recomputation(
            self._step, lambda t: id(t) in ids or self._is_always_kept(t)
        )
        return self._trial(chosen, plan.segments, enough)

    def _trial(
        self, kept: tuple[Tensor, ...], segments: Sequence[Segment], enough: float
    ) -> Trial:
        program = self.program.program(segments)
        peak = worst = simulate(program).peak
        if peak < enough:
            worst = max(peak, peak_of_two_threads(program))
        cost = sum(self._cost(op) for segment in segments for op in segment.ops)
        return Trial(kept, peak, worst, cost)

    def _cost(self, op: Operation) -> int:
        if op not in self._costs:
            self._costs[op] = multiply_adds(op)
        return self._costs[op]

    def _is_always_kept(self, tensor: Tensor) -> bool:
        # The graph holds its tensors, so their ids are theirs for good.
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = self._always(tensor)
        return known
