"""Two timelines side by side."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.graph.types import type_name
from geutil.memory.measuring.job import Measurement
from geutil.memory.sizes import megabytes
from geutil.memory.timeline import Timeline
from geutil.notebook_display import Shown


@dataclass(frozen=True)
class TimelineComparison(Shown):
    """What a change did to the memory of a step.

    Attributes:
        before: the step as it was.
        after: the step as it is.
    """

    before: Timeline
    after: Timeline

    @property
    def ratio(self) -> float:
        """The peak after, as a part of the peak before."""
        if self.before.peak == 0:
            return 1.0 if self.after.peak == 0 else math.inf
        return self.after.peak / self.before.peak

    @property
    def saved(self) -> int:
        """By how many bytes the peak is lower; negative if it is higher."""
        return self.before.peak - self.after.peak

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw both over their progress, with the largest tensors at each peak.

        Args:
            path: the file to write; its suffix (.png, .svg, .pdf) is the format.

        Returns:
            The path.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix is none of the above.

        Cost: linear in the ops.

        Example:
            >>> import tempfile
            >>> from geutil.memory import Moment, Timeline, compare
            >>> before = Timeline((Moment("a", 8_000_000),), (), 0, 0, "predicted")
            >>> after = Timeline((Moment("a", 2_000_000),), (), 0, 0, "predicted")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     compare(before, after).plot(f"{folder}/both.svg").name
            'both.svg'
        """
        from geutil.memory.plotting import plot_timelines

        return plot_timelines([("before", self.before), ("after", self.after)], path)

    def __str__(self) -> str:
        before, after = megabytes(self.before.peak), megabytes(self.after.peak)
        change = "saves" if self.saved >= 0 else "costs"
        headline = (
            f"peak {before} -> {after}: {self.ratio:.2f} of it, {change} "
            f"{megabytes(abs(self.saved))}"
        )
        return f"{headline}\nbefore: {self.before}\nafter: {self.after}"


def compare(
    before: Timeline | Measurement, after: Timeline | Measurement
) -> TimelineComparison:
    """Compare the memory of two steps.

    Args:
        before: a timeline, predicted or measured, or a measurement that has one.
        after: likewise.

    Returns:
        Both, with the ratio of their peaks, as text or picture.

    Raises:
        ArgumentTypeError: one is neither a timeline nor a measurement.
        MeasurementError: a measurement has no timeline, as under XLA; compare the
            `peak` of both then.

    Cost: none.

    Example:
        >>> from geutil.memory import Moment, Timeline, compare
        >>> before = Timeline((Moment("a", 8_000_000),), (), 0, 0, "predicted")
        >>> after = Timeline((Moment("a", 2_000_000),), (), 0, 0, "predicted")
        >>> comparison = compare(before, after)
        >>> comparison.ratio, comparison.saved
        (0.25, 6000000)
    """
    return TimelineComparison(_timeline(before, "before"), _timeline(after, "after"))


def _timeline(side: object, name: str) -> Timeline:
    if isinstance(side, Measurement):
        if side.timeline is None:
            raise MeasurementError(
                f"the measurement '{name}' has no timeline: only a step that XLA does "
                "not compile and that is no callable has one; compare the peaks"
            )
        return side.timeline
    if not isinstance(side, Timeline):
        raise ArgumentTypeError(
            f"{name}: expected a Timeline or a Measurement, got {type_name(side)}"
        )
    return side
