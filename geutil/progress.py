"""Progress bars of calls that take long, by rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

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
