"""The table of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.gradients.cases import RECOMPUTE, REMAT
from benchmarks.gradients.rows import Outcome, StepRow
from benchmarks.gradients.ways import MEMORY, PLAIN

if TYPE_CHECKING:
    from rich.console import Console

PEERS = (*RECOMPUTE, *REMAT)
_TITLE = (
    "training steps, ratios to plain tf.gradients: "
    "peak of the allocator / of resident memory, and step time"
)
_HEADINGS = (
    *("plain MB", "peak", "limit", "resident", "time", "limit", ""),
    *("\n".join([*peer.split(), "peak, time"]) for peer in PEERS),
    *("predicted\nplain", "predicted\nmemory"),
)


def show(console: Console, rows: Sequence[StepRow]) -> None:
    """Print the rows, and below them what was raised."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=_TITLE)
    table.add_column("network")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(escape, _cells(row)), style=None if row.ok else "red")
    console.print(table)
    for row in rows:
        for way, outcome in row.outcomes.items():
            for raised in outcome.raised:
                console.print(escape(f"{_name(row)}, {way}: {raised}"))
    missed = sum(not row.ok for row in rows)
    console.print(
        f"{len(rows)} steps, {missed} MISSED", style="red" if missed else "green"
    )


def _cells(row: StepRow) -> list[str]:
    plain = row.outcomes[PLAIN].peak_bytes
    return [
        f"{_name(row)}\n{row.case.size}",
        f"{plain / 1e6:,.0f}" if plain else "",
        _marked(row.peak_ratio(MEMORY), row.peak_ok),
        f"{row.case.peak_limit:.2f}",
        _number(row.resident_ratio(MEMORY)),
        _marked(row.time_ratio(MEMORY), row.time_ok),
        f"{row.case.time_limit:.2f}",
        "ok" if row.ok else "MISSED",
        *(_peer(row, peer) for peer in PEERS),
        *(_predicted(row.outcomes[way]) for way in (PLAIN, MEMORY)),
    ]


def _name(row: StepRow) -> str:
    setting = row.case.setting.name
    return row.case.network + ("" if setting == "default" else f", {setting}")


def _peer(row: StepRow, peer: str) -> str:
    outcome = row.outcomes.get(peer)
    if outcome is None:
        return ""
    if outcome.peak is None:
        return f"raises {outcome.raised[0].split(':')[0]}"
    return f"{_number(row.peak_ratio(peer))}, {_number(row.time_ratio(peer))}"


def _predicted(outcome: Outcome) -> str:
    found = outcome.prediction
    return f"{found.predicted / 1e6:,.0f} MB\n{found.ratio:.2f}x" if found else ""


def _marked(ratio: float | None, reached: bool) -> str:
    return _number(ratio) + ("" if reached else "!")


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
