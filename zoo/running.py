"""Runs models one after the other, each in two processes of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO, Any

from zoo.results import DIED, MISSED, OK, Cell, cell
from zoo.values import kept

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "zoo" / "rows"
"""One file a model. They are kept with the sources: a whole run takes hours, and can be
gone on with elsewhere."""
_PLACES = ROOT / "build" / "zoo"
SECONDS = 300.0
"""How long one journey, or the making of a model, may take."""
_POLL = 0.1
_LIMITS = {"open": 0.0, "fold": 1e-5}
"""How far a saved model may be from what it was, by journey."""
_SLOPES = 1e-5

Say = Callable[[str], None]


@dataclass
class Row:
    """One model of the page.

    Attributes:
        name: its name.
        failed: why the model could not be made; "" where it was.
        cells: the journeys that were taken.
        seconds: how long all of it took.
        day: when the last journey was taken.
        sources: a number of the package's sources, as text, for each state of them that
            journeys were taken with.
    """

    name: str
    failed: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)
    seconds: float = 0.0
    day: str = ""
    sources: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the row."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "name": self.name,
            "failed": self.failed,
            "seconds": self.seconds,
            "day": self.day,
            "sources": self.sources,
            "cells": {name: c.as_dict() for name, c in self.cells.items()},
        }
        part = folder / f"{self.name}.part"
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        part.replace(folder / f"{self.name}.json")


def read_row(folder: Path, name: str) -> Row:
    """Return the row as it was written; an empty one if it never was."""
    path = folder / f"{name}.json"
    if not path.exists():
        return Row(name)
    values = json.loads(path.read_text(encoding="utf-8"))
    values["cells"] = {name: cell(c) for name, c in values["cells"].items()}
    return Row(**values)


def run(
    name: str,
    journeys: Sequence[str],
    folder: Path = FOLDER,
    seconds: float = SECONDS,
    say: Say = lambda _: None,
) -> Row:
    """Take one model on those journeys that its row does not have yet."""
    row = read_row(folder, name)
    left = [journey for journey in journeys if journey not in row.cells]
    if not left or row.failed:
        return row
    began = time.monotonic()
    if package_sources() not in row.sources:
        row.sources.append(package_sources())
    # A folder of its own: processes of a run that was interrupted may still write.
    _PLACES.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=_PLACES))
    (place / "saved").mkdir()
    with _Process("zoo.plain", name, place, *left) as plain:
        say("made by plain TensorFlow")
        made = _made(plain, place, seconds)
        row.failed = made.get("failed", "")
        if not row.failed:
            row.cells |= take(name, place, left, seconds, say)
            say("checked by plain TensorFlow")
            row.cells |= _checked(plain, place, row.cells, seconds)
    row.seconds = round(row.seconds + time.monotonic() - began, 1)
    row.day = datetime.now(UTC).date().isoformat()
    row.write(folder)
    shutil.rmtree(place, ignore_errors=True)
    return row


@cache
def package_sources() -> str:
    """Return a number of all Python files of the package, as text."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "geutil").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _made(plain: _Process, place: Path, seconds: float) -> dict[str, Any]:
    path = place / "made.pickle"
    if not plain.wait_for(path.exists, seconds):
        return {"failed": f"TensorFlow itself {plain.fate(seconds)}"}
    made: dict[str, Any] = kept(path)
    return made


def take(
    name: str, place: Path, journeys: Sequence[str], seconds: float, say: Say
) -> dict[str, Cell]:
    """Take the journeys; where a process dies, another one goes on behind it."""
    cells: dict[str, Cell] = {}
    while left := [journey for journey in journeys if journey not in cells]:
        with _Process("zoo.child", name, place, *left) as child:
            for journey in left:
                say(journey)
                done = child.wait_for(lambda j=journey: j in _ended(place), seconds)
                if not done:
                    fate = child.fate(seconds)
                    cells[journey] = Cell(DIED, fate, child.last_words())
                    break
                cells[journey] = _ended(place)[journey]
    return cells


def _ended(place: Path) -> dict[str, Cell]:
    path = place / "cells.jsonl"
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return {line["ends"]: cell(line["cell"]) for line in whole if "ends" in line}


def _checked(
    plain: _Process, place: Path, cells: dict[str, Cell], seconds: float
) -> dict[str, Cell]:
    """Return the cells of saved models, with what plain TensorFlow found of them."""
    path = place / "checked.pickle"
    plain.say_go()
    if not plain.wait_for(path.exists, seconds):
        fate = plain.fate(seconds)
        saved = [p.name for p in (place / "saved").iterdir()]
        return {n: Cell(DIED, f"the check {fate}") for n in saved if n in cells}
    found = kept(path)
    return {n: _with_check(n, cells[n], found[n]) for n in found if n in cells}


def _with_check(journey: str, found: Cell, checked: Any) -> Cell:
    """Return a cell that also says what became of the saved model."""
    if found.state not in (OK, MISSED):
        return found
    if isinstance(checked, str):
        wrong = [f"saved: plain TensorFlow says {checked}"]
    else:
        limit = _LIMITS[journey]
        wrong = []
        if checked["apart"] > limit:
            wrong.append(f"saved: differs by {checked['apart']:.1e} of the range")
        if checked.get("lost"):
            wrong.append(f"saved: no gradient of {', '.join(checked['lost'])}")
        if checked.get("slopes_apart", 0.0) > _SLOPES:
            wrong.append(f"saved: gradients differ by {checked['slopes_apart']:.1e}")
    if not wrong:
        return found
    notes = [*wrong, *([found.note] if found.note else [])]
    return Cell(MISSED, found.text, "; ".join(notes))


class _Process:
    """A module in a process of its own, ended when its block ends."""

    def __init__(self, module: str, name: str, place: Path, *arguments: str) -> None:
        self._log: IO[bytes] = (place / f"{module}.log").open("ab")
        self._log_path = Path(self._log.name)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, name, str(place), *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait; tell whether the condition came true before the process ended."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            alive = self._process.poll() is None
            if condition():
                return True
            if not alive:
                return False
            time.sleep(_POLL)
        return False

    def say_go(self) -> None:
        """Let a process go on that waits for a line."""
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def fate(self, seconds: float) -> str:
        """Say why nothing came."""
        code = self._process.poll()
        return f"took over {seconds:g} s" if code is None else f"ended with {code}"

    def last_words(self) -> str:
        """Return the last line that it printed."""
        self._log.flush()
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
