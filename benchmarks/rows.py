"""One line of the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement and its limit.

    Attributes:
        family: what `--only` selects by.
        work: what was done.
        graph: the name of the graph.
        ours: geutil's median in `unit`.
        baseline: the baseline's; None if the limit is on `ours` itself.
        limit: the largest ratio, or the largest `ours`.
        unit: the unit of `ours`, `baseline` and such a limit.
        note: what was seen on the way.
        contrib: what the old graph editor takes, from the project's records.
    """

    family: str
    work: str
    graph: str
    ours: float
    baseline: float | None
    limit: float
    unit: str = "ms"
    note: str = ""
    contrib: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.ours / self.baseline

    @property
    def ok(self) -> bool:
        ratio = self.ratio
        return (self.ours if ratio is None else ratio) <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "ok": self.ok}
