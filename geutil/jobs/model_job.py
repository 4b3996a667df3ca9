"""One model of a batch: a process that does the steps, watched to its end.

Executors run `run_job`, here or on another machine. It always returns, and does not
import TensorFlow: a model that ends its process ends no worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geutil.errors import Words, spoken_with, vocabulary
from geutil.jobs.processes import (
    LOG,
    ForkedProcess,
    ModelProcess,
    StartedProcess,
)
from geutil.jobs.report import (
    BatchEntry,
    BatchStep,
    write_json,
)
from geutil.jobs.sources import DataSource
from geutil.jobs.steps import PipelineStep
from geutil.notes import MOVED, note
from geutil.sizes import size_of

WORK = ".batch"
"""The folder, in that of the results, where unfinished ones are."""
REPORT, PROGRESS, JOB = "report.json", "progress.json", "job"
_STOP = "stop"
_POLL = 0.1
"""Seconds between two looks at a process."""
_LIMIT = Words("timeout", key="timeout=")
_WORDS = 300
"""Characters of the last line of a process that a reason shows."""


@dataclass(frozen=True)
class Job:
    """The input of a process.

    Attributes:
        entry: the model: its name, its path and its fingerprint.
        run: the name of the call of `batch`, which no other has.
        data: the data to calibrate with, if there is any.
        signature: the signature to open; None as in `geutil.model.open`.
        timeout: how many seconds the process may take; None is without end.
        pages: whether to write a page, too.
        server: the socket of a server that forks processes; "" for none.
        vocabulary: the words of messages; see `geutil.errors.Words`.
    """

    entry: BatchEntry
    output: Path
    run: str
    steps: tuple[PipelineStep, ...]
    data: DataSource | None
    signature: str | None
    timeout: float | None
    pages: bool
    server: str = ""
    vocabulary: Mapping[str, str] = field(default_factory=lambda: {**vocabulary()})


def run_job(job: Job) -> BatchEntry:
    """Run the process of a model, and move the files that it wrote into their place.

    Whatever the process does is reported by the entry. It does not outlive this call,
    nor the process that this runs in.
    """
    work = job.output / WORK / job.run
    mark = hashlib.sha256(job.entry.name.encode()).hexdigest()[:16]
    # Files that are there were left by workers that died.
    tries = 1 + sum(place.name.startswith(mark) for place in work.iterdir())
    place = Path(tempfile.mkdtemp(prefix=f"{mark}-", dir=work))
    (place / JOB).write_bytes(pickle.dumps(job))
    process = _process(job, place)
    began = time.monotonic()
    ended, peak_bytes = _watch(process, job.timeout, work / _STOP)
    with spoken_with(job.vocabulary):
        entry = _entry(job, place, process.code or 0, ended)
    entry = replace(
        entry,
        tries=tries,
        seconds=time.monotonic() - began,
        peak_bytes=max(peak_bytes, entry.peak_bytes),
    )
    _finish(job, place, entry)
    return entry


def stop_jobs(output: Path, run: str) -> None:
    """Let all processes of a call of `batch` end, wherever they run."""
    (output / WORK / run / _STOP).touch()


def _process(job: Job, place: Path) -> ModelProcess:
    if job.server:
        # Without a server, or where it does not fork, a process is started.
        with contextlib.suppress(OSError):
            return ForkedProcess(place, job.server)
    return StartedProcess(place)


def _watch(process: ModelProcess, timeout: float | None, stop: Path) -> tuple[str, int]:
    """Wait for a process; return "ended", "timed out" or "stopped", and its peak."""
    end = None if timeout is None else time.monotonic() + timeout
    peak_bytes, ended = 0, ""
    try:
        while not ended:
            process.wait(_POLL)
            peak_bytes = max(peak_bytes, peak_of(process.pid))
            if process.code is not None:
                ended = "ended"
            elif end is not None and time.monotonic() > end:
                ended = "timed out"
            elif stop.exists():
                ended = "stopped"
    finally:
        process.kill()
        process.close()
    return ended, max(peak_bytes, process.peak_bytes)


def peak_of(pid: int | str) -> int:
    """Return the most bytes that a process had resident; 0 where that is not told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0


def _entry(job: Job, place: Path, code: int, ended: str) -> BatchEntry:
    """Return the outcome of a model, from its process's notes and end."""
    noted = _noted(place / PROGRESS)
    entry = replace(
        job.entry,
        step=noted.get("step", "start"),
        steps=tuple(BatchStep(**step) for step in noted.get("steps", ())),
        peak_bytes=noted.get("peak_bytes", 0),
    )
    if ended == "stopped":
        return replace(entry, action="stopped", reason="the batch was stopped")
    if ended == "timed out":
        reason = f"it took longer than {job.timeout:g} s; pass a longer {_LIMIT}"
        return replace(entry, action="timed out", reason=reason)
    if noted.get("error"):
        return replace(entry, action="failed", reason=noted["error"])
    if code == 0 and noted.get("complete"):
        files = {name: size_of(place / name) for name in noted["files"]}
        return replace(entry, action="done", reason="", step="", files=files)
    return replace(entry, action="crashed", reason=_death(code, place / LOG))


def _noted(file: Path) -> dict[str, Any]:
    try:
        noted: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return noted


def _death(code: int, log: Path) -> str:
    """Return how a process ended, with its last words."""
    how = f"the process ended with status {code}"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        how = f"the process was ended by {name}"
        if name == "SIGKILL":
            how += " (out of memory?)"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return f"{how}; its last line: {words[-1][:_WORDS]}" if words else how


def _finish(job: Job, place: Path, entry: BatchEntry) -> None:
    """Put the folder of a model into its place; if not done, log and report."""
    (place / JOB).unlink()
    (place / PROGRESS).unlink(missing_ok=True)
    if not entry.is_done:
        for part in place.iterdir():
            if part.name != LOG:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
    write_json(place / REPORT, entry_data(entry))
    # mkdtemp lets nobody else read it.
    place.chmod(0o777 & ~_umask())
    target = job.output / entry.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    note(MOVED, str(target), place.stat().st_ino)
    place.replace(target)


def entry_data(entry: BatchEntry) -> dict[str, Any]:
    """Return an entry as JSON can hold it."""
    return {**vars(entry), "steps": [vars(step) for step in entry.steps]}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
