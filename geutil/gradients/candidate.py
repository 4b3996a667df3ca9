"""A choice for a step, as data, and what it comes to: nothing of it is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from geutil.gradients.encodings import EncodingPlan
from geutil.gradients.loops import LoopValues
from geutil.gradients.prediction import StepProgram, program_of
from geutil.gradients.segments import Recomputation
from geutil.gradients.selection import Keeping
from geutil.memory.times import Times


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice for a step.

    Attributes:
        keeping: what is kept, and why.
        plan: what is recomputed, of the step that is encoded and whose loops compute
            values again, by edits that are not made yet.
        plain: the step with plain gradients, as numbers, if it may be another one.
        encodings: what is encoded; None if that was not open.
        encoded: the numbers of the encodings among all that were possible.
        levels: for each loop what runs again: nothing (0), or one of its cuts.
        loops: what a report says of each.
        longer: the time of the step's ops, as a part of that without what loops
            compute again.
        in_budget: whether less time is better; less bytes at the peak otherwise.
    """

    keeping: Keeping
    plan: Recomputation
    plain: StepProgram | None = None
    encodings: EncodingPlan | None = None
    encoded: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    loops: tuple[LoopValues, ...] = ()
    longer: float = 1.0
    in_budget: bool = False

    @cached_property
    def cost(self) -> float:
        """The time of the step within a budget, its peak otherwise."""
        if self.in_budget:
            return (1 + self._extra) * self._longer
        return program_of(self.plan.step).peak(self.plan.segments, self.plan.places)

    @cached_property
    def extra_times(self) -> tuple[float, float]:
        """The extra time and its bound, as parts of the time of plain gradients."""
        bound, longer = self.keeping.bound, self._longer
        if self.keeping.extra_time is not None:
            return self.keeping.extra_time, bound
        if longer == 1.0:
            return self._extra, bound
        # Of a bound of 0 nothing is known.
        least = max((1 + bound) * longer - 1, 0.0) if bound else 0.0
        return max((1 + self._extra) * longer - 1, 0.0), least

    @cached_property
    def _extra(self) -> float:
        return extra_share(self.plan, self.keeping.time_of)

    @cached_property
    def _longer(self) -> float:
        """The time of the step's ops, as a part of that with plain gradients."""
        if not (self.plain and self.encodings and self.encodings.encodings):
            return self.longer
        time_of = self.keeping.time_of
        plain = sum(map(time_of, self.plain.ops)) or 1.0
        return self.longer * sum(map(time_of, self.plan.step.ops())) / plain


def extra_share(plan: Recomputation, time_of: Times) -> float:
    """Return what runs again or travels takes, as a part of the plain step's time."""
    extra = sum(map(time_of, plan.run_again)) + plan.transfer_time
    return extra / (sum(map(time_of, plan.step.ops())) or 1.0)
