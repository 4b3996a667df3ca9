"""Processes of models: started afresh, or forked where TensorFlow is imported already.

TensorFlow takes seconds to import. A server does it once for a batch on this machine,
and forks for each model. A fork is safe while the server has no other thread: importing
TensorFlow starts none, and OpenBLAS is asked to start none. The server counts its
threads before each fork; if there are more, and on systems other than Linux, processes
are started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

CHILD = "geutil.cli.batch_child"
"""The module that does the steps: of a layer above, it is run and not imported."""
SERVE = "--serve"
LOG = "log.txt"
# Seconds between two looks; commands end within 1 s of a signal.
_POLL = 0.05
# Linux counts `ru_maxrss` in units of 1,024 bytes (getrusage(2)).
_KB = 1024
_STARTED = 120.0
"""Seconds for a server to import TensorFlow."""
_STOPPED = 5.0
"""Seconds for a server to end that is asked to."""


class ModelProcess(ABC):
    """A process that does a job.

    Attributes:
        pid: its number; 0 before it runs.
        code: its exit status, negative for a signal; None while it runs.
        peak_bytes: the most bytes that it had resident, if that is reported at its end.
    """

    pid = 0
    peak_bytes = 0
    code: int | None = None

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait for its end, and set `code` if it came."""

    def kill(self) -> None:
        """End it, and the processes that it started."""
        if not self.pid:
            return
        if not hasattr(os, "killpg"):
            if self.code is None:
                os.kill(self.pid, signal.SIGTERM)
            return
        # It leads a group. There is none any more if it ended and left no other.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @abstractmethod
    def close(self) -> None:
        """Let go of it, after its end."""


class StartedProcess(ModelProcess):
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


class ForkedProcess(ModelProcess):
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
                self.wait(_POLL)
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
                self.code, self.peak_bytes = numbers
            else:
                (self.pid,) = numbers

    def close(self) -> None:
        """Let go of it, after its end."""
        self._connection.close()
        os.close(self._lifeline)


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
    """Tell whether there are servers on this system."""
    return sys.platform == "linux"


def serve(listener: socket.socket, do_job: Callable[[Path], None]) -> None:
    """Fork for each connection, until the standard input ends."""
    gc.freeze()
    connections: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [], _POLL)
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
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        # They are the server's: their end reports its death.
        for one in sockets:
            one.close()
        os.dup2(lifeline, 0)
        os.close(lifeline)
        log = os.open(place / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        do_job(place)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the server's may run at the end.
        os._exit(code)


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
