"""Tables of reports, as the viewer shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """What happened to one candidate.

    Attributes:
        outcome: a word for it, such as "folded".
        good: whether what was asked for was done.
        what: the candidate.
        detail: into what, or why not.
        names: the ops or scopes that it is about, those of the result first.
    """

    outcome: str
    good: bool
    what: str
    detail: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """A report as a table.

    Attributes:
        title: what it reports on.
        summary: lines that say how much was done.
        rows: the candidates.
    """

    title: str
    summary: tuple[str, ...]
    rows: tuple[Row, ...]

    def data(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)
