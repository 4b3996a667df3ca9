"""Trying a choice out: the peak of a step that recomputes by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geutil.gradients.costs import multiply_adds
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps, Segment, plan_recomputation
from geutil.gradients.sizes import tensor_bytes
from geutil.gradients.step import Step
from geutil.graph.kinds import Operation, Tensor


@dataclass(frozen=True, eq=False)
class Trial:
    """A choice and what it leads to.

    Attributes:
        kept: the tensors.
        peak: the predicted peak in bytes.
        cost: the multiply-adds that are done again.
        held: the bytes of the tensors.
    """

    kept: tuple[Tensor, ...]
    peak: int
    cost: int
    held: int


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
        return self._trial((), ())

    def run(self, kept: Iterable[Tensor]) -> Trial:
        """Return what a choice leads to.

        Args:
            kept: the choice.

        Cost: linear in the ops of the step and their edges; some 20 us for each op.
        """
        chosen = tuple(kept)
        ids = frozenset(map(id, chosen))
        plan = plan_recomputation(
            self._step, lambda t: id(t) in ids or self._is_always_kept(t)
        )
        return self._trial(chosen, plan.segments)

    def _trial(self, kept: tuple[Tensor, ...], segments: Sequence[Segment]) -> Trial:
        peak = self.program.peak(segments)
        cost = sum(self._cost(op) for segment in segments for op in segment.ops)
        return Trial(kept, peak, cost, sum(map(tensor_bytes, kept)))

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
