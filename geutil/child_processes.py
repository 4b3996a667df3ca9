"""Child processes: forked, watched to their end or to a limit of time, then gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable


class ChildProcess(ABC):
    """A process that is watched.

    Attributes:
        pid: its number; 0 before it runs.
        code: its exit status, negative for a signal; None while it runs.
        peak_bytes: the most bytes that it had resident, if somebody measures that.
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


def watch(
    process: ChildProcess,
    limit: float | None,
    every: float,
    look: Callable[[], str] | None = None,
) -> str:
    """Wait for the end of a process, and end it if that does not come.

    Args:
        process: the process, which is gone afterwards.
        limit: how many seconds it may take; None is without end.
        every: the most seconds between two looks.
        look: called at each look; a word that it returns ends the process.

    Returns:
        "ended", "timed out", or the word of `look`.
    """
    end = None if limit is None else time.monotonic() + limit
    ended = ""
    try:
        while not ended:
            left = every if end is None else end - time.monotonic()
            process.wait(max(0.0, min(every, left)))
            word = "" if look is None else look()
            # A process that has ended counts as ended, even if it is seen too late.
            if process.code is not None:
                ended = "ended"
            elif end is not None and time.monotonic() > end:
                ended = "timed out"
            else:
                ended = word
    finally:
        process.kill()
        process.close()
    return ended


def fork(function: Callable[[], int]) -> int:
    """Return the number of a copy of this process, which calls a function and ends.

    The result of the function is its exit status: 1 if there is an error.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing of the first process may run at the end.
        os._exit(code)


class ForkedCall(ChildProcess):
    """A copy of this process that calls a function with a pipe to write to.

    It is in the group of this process, so that signals of the terminal reach it, and
    whoever ends the group ends it.
    """

    def __init__(self, function: Callable[[int], int]) -> None:
        reading, writing = os.pipe()
        self._reading = reading
        self._parts: list[bytes] = []

        def call() -> int:
            # If the first process dies, a full pipe is an error, and no wait for ever.
            os.close(reading)
            return function(writing)

        self.pid = fork(call)
        os.close(writing)

    @property
    def output(self) -> bytes:
        """The bytes that it wrote to the pipe."""
        return b"".join(self._parts)

    def wait(self, seconds: float) -> None:
        """Wait for output, or for its end, and set `code` if that came."""
        if select.select([self._reading], [], [], seconds)[0]:
            self._parts.append(os.read(self._reading, 1 << 16))
            if not self._parts[-1]:
                self._reap()

    def kill(self) -> None:
        """End it."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it, after its end."""
        if self.code is None:
            self._reap()
        os.close(self._reading)

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
