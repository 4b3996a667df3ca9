"""`python -m zoo [--only NAME] [--journey NAME] [--again] [--minutes N]`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo import page
from zoo.journeys import JOURNEYS
from zoo.models import MODELS, Entry
from zoo.results import DIED, ERROR, MISSED, REFUSED
from zoo.running import FOLDER, ROOT, SECONDS, Row, run

PAGE = ROOT / "docs" / "zoo.md"


def main() -> None:
    """Take models on their journeys, and write the page."""
    options = _options()
    folder: Path = options.folder
    names = options.only or list(MODELS)
    if options.again:
        for name in names:
            (folder / f"{name}.json").unlink(missing_ok=True)
    entries = [MODELS[name] for name in names]
    missing = sorted({entry.needs for entry in entries if entry.missing})
    if missing:
        print(f"not installed: {', '.join(missing)}; pip install -e '.[zoo]'")
    entries = [entry for entry in entries if not entry.missing]
    if not options.page:
        journeys = options.journey or list(JOURNEYS)
        _run(entries, journeys, folder, options.seconds, 60 * options.minutes)
    PAGE.write_text(page.page(folder), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} is written")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m zoo")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(MODELS),
        metavar="NAME",
        help="run one model; may be repeated",
    )
    parser.add_argument(
        "--journey",
        action="append",
        choices=list(JOURNEYS),
        metavar="NAME",
        help=f"take one journey; may be repeated: {', '.join(JOURNEYS)}",
    )
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the limit of one journey"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no model after these"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the results")
    return parser.parse_args()


def _run(
    entries: Sequence[Entry],
    journeys: Sequence[str],
    folder: Path,
    seconds: float,
    time_limit: float,
) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    began = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(entries))
        for entry in entries:
            if time.monotonic() - began > time_limit:
                break

            def say(what: str, name: str = entry.name) -> None:
                progress.update(task, description=f"{name}: {what}")

            row = run(entry.name, journeys, folder, seconds, say)
            progress.console.print(_line(row), markup=False, highlight=False)
            progress.advance(task)


def _line(row: Row) -> str:
    """Return one line on a row: how it went, and what went wrong."""
    bad = (MISSED, REFUSED, ERROR, DIED)
    wrong: list[Any] = [
        f"{name} {cell.state} ({cell.text})"
        for name, cell in row.cells.items()
        if cell.state in bad
    ]
    said = row.failed or ", ".join(wrong) or "ok"
    return f"{row.name}: {said} [{row.seconds:.0f} s]"


if __name__ == "__main__":
    main()
