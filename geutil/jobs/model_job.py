"""One model of a batch: a process that does the steps, watched to its end.

Executors run `run_job`, here or on another machine. It always returns, and does not
import TensorFlow: a model that crashes its process does not end the worker.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geutil.child_processes import ChildProcess, fork, watch
from geutil.errors import Words, spoken_with, vocabulary
from geutil.jobs.batch_inputs import DataSource, PipelineStep
from geutil.jobs.batch_report import BatchEntry, BatchStep, write_json
from geutil.progress import MOVED, note
from geutil.sizes import size_of

CHILD = "geutil.cli.batch_child"
"""The module that does the steps: of a layer above, it is run and not imported."""
SERVE = "--serve"
LOG = "log.txt"
# Seconds between two looks; commands end within 1 s of a signal.
_LOOK = 0.05
# Linux counts `ru_maxrss` in units of 1,024 bytes (getrusage(2)).
_KB = 1024
_STARTED = 120.0
"""Seconds for a server to import TensorFlow."""
_STOPPED = 5.0
"""Seconds for a server to end that is asked to, or a forked process that is killed."""


class StartedProcess(ChildProcess):
    """A fresh process."""

    def __init__(self, place: Path) -> None:
        with (place / LOG).open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(place)],
                # It is never written to: that it ends tells the process that we did.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def wait(self, seconds: float) -> None:
        """Wait for its end, and set `code` if it came."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._popen.wait(seconds)

    def close(self) -> None:
        """Let go of it, after its end."""
        self.code = self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


class ForkedProcess(ChildProcess):
    """A process that a server forks."""

    def __init__(self, place: Path, address: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._received = b""
        # Its end tells the process that this one ended, as with one that is started.
        read_end, self._lifeline = os.pipe()
        try:
            self._connection.connect(address)
            socket.send_fds(self._connection, [str(place).encode()], [read_end])
            end = time.monotonic() + _STARTED
            while not self.pid:
                if time.monotonic() > end:
                    raise TimeoutError("the server of processes does not start")
                self.wait(_LOOK)
        except OSError:
            self.close()
            raise
        finally:
            os.close(read_end)

    def wait(self, seconds: float) -> None:
        """Wait for its end, and set `code` if it came."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return
        data = self._connection.recv(64)
        if not data:
            # Nobody knows whether the process goes on.
            self.kill()
            raise ConnectionError("the server of processes does not fork any more")
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            # First its number, then what it ended with and its peak.
            numbers = [int(number) for number in line.split()]
            if self.pid:
                self.code, peak_bytes = numbers
                self.peak_bytes = max(self.peak_bytes, peak_bytes)
            else:
                (self.pid,) = numbers

    def kill(self) -> None:
        """End it, and the processes that it started; return once it is gone."""
        super().kill()
        if self.pid and self.code is None:
            # A fork leads its group only a moment after the server told its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        # The server, whose child it is, takes note of its end a moment later.
        end = time.monotonic() + _STOPPED
        while self.code is None and _exists(self.pid) and time.monotonic() < end:
            time.sleep(_LOOK)

    def close(self) -> None:
        """Let go of it, after its end."""
        self._connection.close()
        os.close(self._lifeline)


def _exists(pid: int) -> bool:
    """Return whether there is a process of that number; 0 is that of none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is another user's, who got the number since.
        return False
    return pid > 0


class ForkServer:
    """A process that imports TensorFlow once, and forks for each model."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="geutil-")
        self.address = str(Path(self._folder, "server"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            # Its messages at the start are repeated by processes without it.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", CHILD, SERVE, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment() | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End it; processes that it forked are those of others."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(_STOPPED)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def can_fork() -> bool:
    """Return whether there are servers on this system."""
    return sys.platform == "linux"


def serve(listener: socket.socket, do_job: Callable[[Path], None]) -> None:
    """Fork for each connection, until the standard input ends."""
    gc.freeze()
    connections: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [], _LOOK)
        if sys.stdin in readable:
            return
        if listener in readable:
            connection, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            pid = 0
            # Who asked may have gone already.
            if message and len(os.listdir("/proc/self/task")) == 1:  # noqa: PTH208
                pid = _forked(
                    Path(message.decode()),
                    descriptors[0],
                    [listener, connection, *connections.values()],
                    do_job,
                )
            for descriptor in descriptors:
                os.close(descriptor)
            if pid:
                _tell(connection, pid)
                connections[pid] = connection
            else:
                connection.close()
        for pid in list(connections):
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                _tell(connections[pid], code, usage.ru_maxrss * _KB)
                connections.pop(pid).close()


def _forked(
    place: Path,
    lifeline: int,
    sockets: Sequence[socket.socket],
    do_job: Callable[[Path], None],
) -> int:
    """Return the number of a new process."""

    def begin() -> int:
        os.setsid()
        # They are the server's: their end reports its death.
        for one in sockets:
            one.close()
        os.dup2(lifeline, 0)
        os.close(lifeline)
        log = os.open(place / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            do_job(place)
        finally:
            sys.stdout.flush()
        return 0

    return fork(begin)


def _tell(connection: socket.socket, *numbers: int) -> None:
    # Who asked may have gone.
    with contextlib.suppress(OSError):
        connection.sendall(f"{' '.join(map(str, numbers))}\n".encode())


def _environment() -> dict[str, str]:
    """Return this process's environment, with where to import from."""
    environment = dict(os.environ)
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Several processes share a GPU.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environment


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

    def look() -> str:
        process.peak_bytes = max(process.peak_bytes, peak_of(process.pid))
        return "stopped" if (work / _STOP).exists() else ""

    ended = watch(process, job.timeout, _POLL, look)
    with spoken_with(job.vocabulary):
        entry = _entry(job, place, process.code or 0, ended)
    entry = replace(
        entry,
        tries=tries,
        seconds=time.monotonic() - began,
        peak_bytes=max(process.peak_bytes, entry.peak_bytes),
    )
    _finish(job, place, entry)
    return entry


def stop_jobs(output: Path, run: str) -> None:
    """Let all processes of a call of `batch` end, wherever they run."""
    (output / WORK / run / _STOP).touch()


def _process(job: Job, place: Path) -> ChildProcess:
    if job.server:
        # Without a server, or where it does not fork, a process is started.
        with contextlib.suppress(OSError):
            return ForkedProcess(place, job.server)
    return StartedProcess(place)


def peak_of(pid: int | str) -> int:
    """Return the peak resident bytes of a process; 0 where the system has no number."""
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
    # A step that calls sys.exit ends the process well, but too early.
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
