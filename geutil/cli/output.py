"""What the command prints: text for people, JSON for scripts, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something takes its time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield


def show(result: Any, *, as_json: bool) -> None:
    """Print a result: what `str` makes of it, or JSON."""
    if as_json:
        print(json.dumps(plain(result), indent=2, sort_keys=False))
    else:
        print(result)


def show_rows(
    titles: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool
) -> None:
    """Print a table; into a pipe, rows of words with tabs between them."""
    listed = [list(row) for row in rows]
    if as_json:
        keys = [title.replace(" ", "_") for title in titles]
        show([dict(zip(keys, row, strict=True)) for row in listed], as_json=True)
        return
    if not sys.stdout.isatty():
        for row in listed:
            print("\t".join(map(str, row)))
        return
    table = Table(*titles, box=None)
    for row in listed:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dictionaries, lists, numbers and strings.

    Example:
        >>> import numpy as np
        >>> plain({"a": (1, np.float32(0.5)), "b": {3: None}})
        {'a': [1, 0.5], 'b': {'3': None}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return getattr(value, "name", str(value))
