"""What comes of a scheme, and how processes hand it over: needs nothing but Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

_FILE, _ERROR = ".tflite", ".txt"


@dataclass(frozen=True)
class Made:
    """What came of a scheme.

    Attributes:
        blob: the file.
        error: what was raised, where there is no file.
    """

    blob: bytes = b""
    error: str = ""


def attempt(make: Callable[[], bytes]) -> Made:
    """Return a file, or what making it raises, in one line."""
    try:
        return Made(make())
    except Exception as error:  # Of whatever class: it is told below the table.
        first = str(error).strip().splitlines() or [""]
        return Made(error=f"{type(error).__name__}: {first[0]}")


def write_all(schemes: dict[str, Callable[[], bytes]], folder: Path) -> None:
    """Write what comes of schemes into a folder, each as soon as it is there."""
    for name, make in schemes.items():
        made = attempt(make)
        # Names have slashes.
        stem = quote(name, safe="")
        if made.error:
            (folder / f"{stem}{_ERROR}").write_text(made.error)
        else:
            (folder / f"{stem}{_FILE}").write_bytes(made.blob)


def read_all(folder: Path) -> dict[str, Made]:
    """Return what `write_all` has written, by the name of the scheme."""
    return {
        unquote(path.stem): Made(path.read_bytes())
        if path.suffix == _FILE
        else Made(error=path.read_text())
        for path in sorted(folder.iterdir())
    }
