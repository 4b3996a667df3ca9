"""The table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

# Wide enough for a row to stay on a line or two when the output is no terminal.
_WIDTH = 160


def make_console() -> Console:
    """Return a rich console, or say where rich comes from."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise SystemExit(
            "The benchmarks print their table with rich, which is in the extra "
            "'bench': pip install -e '.[bench]'"
        ) from error
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the rows, and count those that miss their limit."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="geutil against bare loops, medians of one run")
    for heading in ("work", "graph"):
        table.add_column(heading)
    for heading in ("geutil ms", "baseline ms", "ratio", "must reach"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("contrib on TF 2.21")
    for index, row in enumerate(rows):
        work = f"{row.work} ({row.note})" if row.note else row.work
        table.add_row(
            escape(work),
            row.graph,
            _amount(row, row.ours),
            "" if row.baseline is None else _amount(row, row.baseline),
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            f"{row.limit:g}x" if row.ratio is not None else _amount(row, row.limit),
            "ok" if row.ok else "MISSED",
            row.contrib,
            style=None if row.ok else "red",
            end_section=rows[index + 1 : index + 2] != []
            and rows[index + 1].family != row.family,
        )
    console.print(table)
    missed = sum(not row.ok for row in rows)
    console.print(
        f"{len(rows)} rows, {missed} MISSED", style="red" if missed else "green"
    )


def _amount(row: Row, value: float) -> str:
    if row.unit == "ms":
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{value:.0f} {row.unit}"
