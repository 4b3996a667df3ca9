"""Pages that commands write besides what they print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from geutil.cli.files import CommandError, check_place
from geutil.cli.output import working

if TYPE_CHECKING:
    from geutil.report import Page

_SUFFIXES = (".html", ".htm")


def check_page(path: Path | None, force: bool) -> None:
    """Refuse to write a page where it cannot be, before there is any work done."""
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise CommandError(
            f"'{path}' is no name of a page; name a file that ends in .html"
        )
    if path.is_dir():
        raise CommandError(f"'{path}' is a directory, and is not replaced by a page")
    check_place(path, force)


def write_page(path: Path, make: Callable[[], Page]) -> None:
    """Make a page and write it; say so where it does not mix with what is printed."""
    with working(f"drawing {path.name}"):
        make().save(path, overwrite=True)
    print(f"geutil: wrote {path}", file=sys.stderr)
