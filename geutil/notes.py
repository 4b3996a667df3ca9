"""Notes of a process for another one that may end it: its step, and files it writes.

They are lines of JSON in a file that an environment variable names, so that the
processes which this one starts add theirs. Without the variable nothing is noted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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
    """Note something, before it happens."""
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
