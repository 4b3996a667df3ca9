"""Progress of calls that take long: bars, and notes for another process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from geutil.errors import MissingExtraError

T = TypeVar("T")


def counted(
    items: Iterable[T],
    total: int | None,
    progress: bool | None,
    title: str,
    *,
    done: int = 0,
) -> Iterator[T]:
    """Yield items, and show on stderr how many there were.

    Args:
        items: the items.
        total: how many there are, if that is known, with those that are done.
        progress: show it; None does so on a terminal, if rich is installed.
        title: what is being done.
        done: how many were done before.

    Raises:
        MissingExtraError: it is asked for, and rich is not installed.
    """
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError as error:
        # A bar that is not asked for is left out where it cannot be shown.
        if progress:
            raise MissingExtraError(
                "a progress bar needs rich; install it with `pip install geutil[cli]`, "
                "or pass progress=False"
            ) from error
        yield from items
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total, done, description=title)


VARIABLE = "GEUTIL_NOTES"
STEP = "step"
"""The step that the process is in, in words."""
MADE = "made"
"""A file or folder that is of no use once the process is dead."""
FOLDER = "folder"
"""A folder that is of use if there is something in it."""
MOVED = "moved"
"""A path and the inode that it has once a finished file is in its place."""
SHOWN = "shown"
"""The process has begun to write to the standard output."""


def note(kind: str, *fields: str | int) -> None:
    """Record something, before it happens."""
    file = os.environ.get(VARIABLE)
    if file:
        # One write at the end of the file is whole, whoever else writes there.
        with Path(file).open("ab", buffering=0) as opened:
            opened.write(f"{json.dumps([kind, *fields])}\n".encode())


def noted(file: Path) -> dict[str, list[Any]]:
    """Return the fields of the notes in a file by their kind, in order."""
    found: dict[str, list[Any]] = {}
    # A process that is killed writes no half line, unless the disk is full.
    for line in file.read_bytes().split(b"\n")[:-1]:
        kind, *fields = json.loads(line)
        found.setdefault(kind, []).append(fields)
    return found
