"""A progress bar over batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from geutil.errors import MissingExtraError

T = TypeVar("T")


def counted(items: Iterable[T], dataset: Any, progress: bool | None) -> Iterator[T]:
    """Yield items, and show how many there were.

    Args:
        items: the items.
        dataset: what they are made from, which may know how many there are.
        progress: show it; None does so on a terminal, if rich is installed.

    Raises:
        MissingExtraError: it is asked for, and rich is not installed.
    """
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        if progress:
            raise MissingExtraError(
                "a progress bar needs rich; install it with `pip install geutil[cli]`, "
                "or pass progress=False"
            ) from error
        yield from items
        return
    console = Console(stderr=True)
    yield from track(items, "calibrating", _count(dataset), console=console)


def _count(dataset: Any) -> int | None:
    """Return how many batches there are, if that is known."""
    if isinstance(dataset, Mapping):
        return 1
    try:
        return len(dataset)
    # A tf.data.Dataset raises if it does not know, or has no end.
    except TypeError:
        return None
