"""Choices of what the loops of a step compute again, each tried on the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from geutil.errors import PlanError
from geutil.gradients.loops.finding import Loop, find_loops
from geutil.gradients.loops.rebuilding import Rebuilt, rebuild
from geutil.gradients.prediction import StepProgram
from geutil.gradients.step import PlainStep
from geutil.graph.state import UndoStep

_NO_LESS = "the step would hold no less at its peak, or take longer than it may"
_NO_FASTER = "the step is within the budget in less time without"
_OTHER_STEP = (
    "the plan was made for another step: that one had {planned} loops whose values can "
    "be computed again, this one has {found}; call geutil.gradients.plan again"
)


@dataclass(frozen=True)
class LoopValues:
    """What the backward pass of a loop computes again each time it turns.

    Attributes:
        name: the name of the loop of the forward pass.
        values: the names of the values, in the body, that are not kept; empty if all
            are.
        ops: how many ops of the body run again.
        bytes: what all iterations together hold less.
        reason: why all values are kept, None if not all are.
    """

    name: str
    values: tuple[str, ...] = ()
    ops: int = 0
    bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class Looped:
    """The loops of a step as they were chosen.

    Attributes:
        plain: the step before, as numbers.
        levels: for each loop what runs again: nothing (0), or one of its cuts.
        values: what a report says of each.
        longer: the time of the step's ops, as a part of that before.
    """

    plain: StepProgram
    levels: tuple[int, ...]
    values: tuple[LoopValues, ...]
    longer: float


Result = TypeVar("Result")
Levels = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tried(Generic[Result]):
    """What comes of a choice.

    Attributes:
        levels: the choice.
        result: what was found for the step then.
        cost: what counts: the less the better.
    """

    levels: Levels
    result: Result
    cost: float


class LoopChoices:
    """The loops of a step, and choices of what they compute again.

    Args:
        step: the step with plain gradients; its graph gets what choices need.

    Attributes:
        loops: its loops.
        plain: the step as numbers, if it has loops.
    """

    def __init__(self, step: PlainStep) -> None:
        self.loops = find_loops(step)
        self._rebuilt: dict[tuple[int, int], Rebuilt] = {}
        self._undo: list[UndoStep] = []
        self._refused: dict[int, str] = {}
        if self.loops:
            self.plain = StepProgram(step)
            ops = step.ops()
            self._time = sum(map(step.op_times(), ops))

    def __bool__(self) -> bool:
        """Tell whether there is anything to choose."""
        return any(loop.cuts for loop in self.loops)

    @property
    def none(self) -> Levels:
        """The choice that all values are kept."""
        return (0,) * len(self.loops)

    def planned(self, levels: Sequence[int]) -> Levels:
        """Return a choice that was made for the same step before.

        Raises:
            PlanError: it was made for another one.
        """
        levels = tuple(levels) or self.none
        fits = len(levels) == len(self.loops) and all(
            level == 0 or level in loop.cuts
            for loop, level in zip(self.loops, levels, strict=True)
        )
        if not fits:
            found = len(self.loops)
            raise PlanError(_OTHER_STEP.format(planned=len(levels), found=found))
        return levels

    def in_order(self) -> list[Levels]:
        """Return choices that hold less and less and take longer and longer.

        Each loop goes on by what saves the most bytes for its time.
        """
        choices = [self.none]
        while True:
            levels = choices[-1]
            more = [
                (self._saved_for_time(loop, level, now), -i, level)
                for i, (loop, now) in enumerate(zip(self.loops, levels, strict=True))
                for level in loop.cuts
                if level > now
            ]
            if not more:
                return choices
            _, place, level = max(more)
            i = -place
            choices.append((*levels[:i], level, *levels[i + 1 :]))

    def _saved_for_time(self, loop: Loop, level: int, now: int) -> float:
        cut, before = loop.cuts[level], loop.cuts.get(now)
        saved = cut.saved - (before.saved if before else 0)
        return saved / max(cut.time - (before.time if before else 0.0), 1.0)

    @contextmanager
    def applied(self, levels: Levels) -> Iterator[float]:
        """Rebuild the loops for the block; yield how much longer the step's ops take.

        Cost: that of rebuilding the loops, once for each choice of each, and of their
            bodies.
        """
        try:
            self.apply(levels)
            yield self.longer(levels)
        finally:
            for step in reversed(self._undo):
                step.undo()
            self._undo.clear()

    def apply(self, levels: Levels) -> None:
        """Rebuild the loops.

        Raises:
            PlanError: TensorFlow does not take one of them apart.
        """
        for i, level in enumerate(levels):
            if level:
                self._undo += self._with(i, level).apply()

    def _with(self, i: int, level: int) -> Rebuilt:
        """Return a loop rebuilt, the same each time."""
        if (i, level) not in self._rebuilt:
            try:
                self._rebuilt[i, level] = rebuild(self.loops[i], level)
            except PlanError as error:
                self._refused[i] = str(error)
                raise
        return self._rebuilt[i, level]

    def longer(self, levels: Levels) -> float:
        """Return the time of the step's ops, as a part of that when values are kept."""
        pairs = zip(self.loops, levels, strict=True)
        more = sum(loop.cuts[level].time for loop, level in pairs if level)
        return 1 + more / (self._time or 1.0)

    def looped(self, levels: Levels, *, in_budget: bool) -> Looped:
        """Return what a report says of the loops, rebuilt as they are."""
        reason = _NO_FASTER if in_budget else _NO_LESS
        values = (
            LoopValues(
                loop.forward.name,
                tuple(pile.value for pile in loop.cuts[level].dropped),
                len(loop.cuts[level].ops),
                loop.cuts[level].saved,
            )
            if level
            else LoopValues(
                loop.forward.name,
                reason=self._refused.get(i) or loop.reason or reason,
            )
            for i, (loop, level) in enumerate(zip(self.loops, levels, strict=True))
        )
        return Looped(self.plain, levels, tuple(values), self.longer(levels))


def best_of(
    choices: Sequence[Levels],
    attempt: Callable[[Levels], Tried[Result] | PlanError],
) -> Tried[Result]:
    """Return the best of some choices that is found by trying few of them.

    Args:
        choices: as `LoopChoices.in_order` has them. If one of them can be met, so can
            those behind it, or all before it.
        attempt: tries a choice; returns an error if nothing was found with it.

    Raises:
        PlanError: nothing was found with any that was tried.

    Cost: that of `attempt`, a few times: twice and the binary logarithm of the choices.
    """
    first, last = attempt(choices[0]), attempt(choices[-1])
    tried = [first, last]
    low, high = 0, len(choices) - 1
    # Where one end cannot be met, the nearest to it that can is wanted; else the middle
    # is one more to choose from.
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(choices[middle])
        tried.append(found)
        if isinstance(first, PlanError) == isinstance(last, PlanError):
            break
        if isinstance(found, PlanError) == isinstance(first, PlanError):
            low = middle
        else:
            high = middle
    met = [t for t in tried if not isinstance(t, PlanError)]
    if not met:
        raise last if isinstance(last, PlanError) else PlanError(_NO_LESS)
    return min(met, key=lambda t: (t.cost, sum(t.levels)))
