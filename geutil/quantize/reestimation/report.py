"""Which batch norms got new statistics, and which did not and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.quantize.reestimation.norms import Missed

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Reestimated:
    """A batch norm with new statistics.

    Attributes:
        norm: its name.
        mean: the new mean of each channel.
        variance: the new variance of each channel.
        folded: whether it is folded into a layer.
        kept: how many channels kept their statistics, since a folded norm multiplies
            them by zero.
    """

    norm: str
    mean: Array
    variance: Array
    folded: bool
    kept: int = 0


@dataclass(frozen=True)
class ReestimateReport:
    """Every batch norm of a model: with new statistics, or not and why.

    Attributes:
        reestimated: the norms with new statistics, in topological order.
        missed: those that were left as they are.
        batches: how many batches there were.
    """

    reestimated: tuple[Reestimated, ...]
    missed: tuple[Missed, ...]
    batches: int

    def __str__(self) -> str:
        done, missed = len(self.reestimated), len(self.missed)
        total = f"{done} of {done + missed} batch norm(s)"
        lines = [f"{total} re-estimated from {self.batches} batch(es)"]
        for entry in self.reestimated:
            where = "folded" if entry.folded else "not folded"
            kept = f", {entry.kept} kept" if entry.kept else ""
            lines.append(f"  {entry.norm}: {entry.mean.size} channels, {where}{kept}")
        lines += [f"  {entry.norm}: left, {entry.reason}" for entry in self.missed]
        return "\n".join(lines)
