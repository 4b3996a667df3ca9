"""Choices of what the loops of a step compute again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from geutil.errors import PlanError
from geutil.gradients.loops.finding import Loop
from geutil.gradients.loops.rebuilding import Rebuilt, rebuild
from geutil.gradients.step import PlainStep

NO_LESS = "the step would hold no less at its peak, or take longer than it may"
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


Levels = tuple[int, ...]
"""For each loop what runs again: nothing (0), or one of its cuts."""


class LoopChoices:
    """The loops of a step, and choices of what they compute again.

    Args:
        step: the step with plain gradients.
        loops: its loops, of which there may be a choice.
    """

    def __init__(self, step: PlainStep, loops: Sequence[Loop]) -> None:
        self.loops = loops
        self._step = step
        self._rebuilt: dict[tuple[int, int], Rebuilt] = {}
        self._refused: dict[int, str] = {}
        self._time = sum(map(step.op_times(), step.ops())) if loops else 0.0

    def planned(self, levels: Sequence[int]) -> Levels:
        """Return a choice that was made for the same step before.

        Raises:
            PlanError: it was made for another one.
        """
        levels = tuple(levels) or (0,) * len(self.loops)
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
        choices: list[Levels] = [(0,) * len(self.loops)]
        while True:
            levels = choices[-1]
            more = [
                (_saved_for_time(loop, level, now), -i, level)
                for i, (loop, now) in enumerate(zip(self.loops, levels, strict=True))
                for level in loop.cuts
                if level > now
            ]
            if not more:
                return choices
            _, place, level = max(more)
            i = -place
            choices.append((*levels[:i], level, *levels[i + 1 :]))

    def rebuilt(self, levels: Levels) -> PlainStep:
        """Return the step with other loops, by edits that are not made yet.

        Raises:
            PlanError: TensorFlow does not take one of them apart.

        Cost: that of rebuilding the loops, once for each choice of each.
        """
        loops = [self._with(i, level) for i, level in enumerate(levels) if level]
        if not loops:
            return self._step
        return replace(self._step, edits=replace(self._step.edits, loops=tuple(loops)))

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

    def values(self, levels: Levels, *, in_budget: bool) -> tuple[LoopValues, ...]:
        """Return what a report says of the loops by a choice."""
        reason = _NO_FASTER if in_budget else NO_LESS
        return tuple(
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


def _saved_for_time(loop: Loop, level: int, now: int) -> float:
    """Return the bytes that a cut saves beyond another one, for the time it takes."""
    cut, before = loop.cuts[level], loop.cuts.get(now)
    saved = cut.saved - (before.saved if before else 0)
    return saved / max(cut.time - (before.time if before else 0.0), 1.0)
