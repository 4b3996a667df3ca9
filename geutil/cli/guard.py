"""A command that can be stopped at any point: its work is done in a process of its own.

TensorFlow's C++ part keeps Python from hearing of signals for seconds, and ends the
process that reads some files: its checks abort. So the process that was started only
passes signals on, to a guard. The guard starts the process that works, and kills it and
all that it has started once there is a signal, or the first process is dead, or nobody
reads the standard output any more. Then it removes all that was left half written, as
the worker noted (`geutil.progress`), and tells in one line how the command ended.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from geutil.progress import FOLDER, MADE, MOVED, SHOWN, STEP, VARIABLE, note, noted
from geutil.writing import remove_made, was_moved

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP")
_PAUSES = ("SIGTSTP", "SIGCONT")
_CLOSED_PIPE = 128 + 13
"""The exit code of a shell for a command that SIGPIPE ends."""
# File descriptors of POSIX.
_STDOUT, _STDERR = 1, 2
_WORKER = "worker"
"""The kind of the note with the number of the worker."""
_POLL = 0.01
"""Seconds between two looks for processes that are dying."""
_DYING = 5.0
"""Seconds for killed processes to be gone, on a machine that is busy."""
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"
"""Clears the line of a terminal, and shows the cursor that a bar has hidden."""
_SHOWN_FILES = 3
"""So many written files are named, and the others counted."""


def guarded(work: Callable[[], int], *, verbose: bool) -> int:
    """Do the work of a command so that it can be stopped; return the exit code.

    The first process returns, and no other one. Where processes cannot fork, or no
    folder can be made, it does the work itself.

    Args:
        work: returns the exit code.
        verbose: whether libraries written in C++ may print, too.
    """
    if not hasattr(os, "fork"):
        return work()
    heard, told = os.pipe()
    for name in (*_STOPS, *_PAUSES):
        # `nohup` has it ignored. A script has SIGINT ignored by its jobs in the
        # background, which are to be stopped with it all the same.
        if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(getattr(signal, name), _passing_on(told))
    try:
        folder = Path(tempfile.mkdtemp(prefix="geutil-"))
    except OSError:
        _set_signals(signal.SIG_DFL)
        return work()
    notes = folder / "notes"
    notes.touch()
    guard = os.fork()
    if not guard:
        os.close(told)
        _start(work, heard, notes, verbose=verbose)
    os.close(heard)
    return _first(guard, notes)


def _start(
    work: Callable[[], int], heard: int, notes: Path, *, verbose: bool
) -> NoReturn:
    """Be the guard: start the worker, and wait for it."""
    # Signals of the terminal reach the first process alone.
    os.setsid()
    _set_signals(signal.SIG_IGN)
    alive, end = os.pipe()
    worker = os.fork()
    if not worker:
        os.close(heard)
        os.close(alive)
        _work(work, notes, verbose=verbose)
    os.close(end)
    _guard(worker, heard, alive, notes)


def _work(work: Callable[[], int], notes: Path, *, verbose: bool) -> NoReturn:
    """Be the worker, up to the end of this process."""
    code = 1
    try:
        os.setpgid(0, 0)
        _set_signals(signal.SIG_DFL)
        os.environ.update({VARIABLE: str(notes), "TMPDIR": str(notes.parent)})
        tempfile.tempdir = None
        note(_WORKER, os.getpid())
        _hold_back(everything=not verbose)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Without Python's last collection: the system frees all, and faster.
        os._exit(code)


def _passing_on(pipe: int) -> Callable[[int, Any], None]:
    """Return a handler of signals that passes them on."""

    def pass_on(number: int, _: Any) -> None:
        # The guard may be dead, which is seen elsewhere.
        with suppress(OSError):
            os.write(pipe, bytes([number]))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    return pass_on


def _set_signals(action: signal.Handlers) -> None:
    for name in (*_STOPS, *_PAUSES):
        signal.signal(getattr(signal, name), action)


def _first(guard: int, notes: Path) -> int:
    """Wait for the guard and return the exit code; clear up if it was killed."""
    _, status = os.waitpid(guard, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    end = time.monotonic() + _DYING
    for (worker,) in noted(notes).get(_WORKER, ()):
        # Whoever has inherited it waits for it.
        while _is_killed(worker) and time.monotonic() < end:
            time.sleep(_POLL)
    _clear(notes, f"stopped, since its guard was killed ({_name(-code)})")
    return 1


def _is_killed(group: int) -> bool:
    """Kill a group of processes; return False if there is none."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _guard(worker: int, heard: int, alive: int, notes: Path) -> NoReturn:
    """Wait for the end of the worker, or a reason to kill it; end this process.

    Args:
        worker: the number of the process.
        heard: numbers of signals come in here; its end is that of the first process.
        alive: its end is that of the worker.
        notes: what the worker notes.
    """
    code = 1
    try:
        # Else it might be killed before it is in a group of its own.
        with suppress(OSError):
            os.setpgid(worker, worker)
        code, why = _ended(worker, heard, alive, notes)
        _is_killed(worker)
        _, status = os.waitpid(worker, 0)
        if not why:
            code, why = _own_end(os.waitstatus_to_exitcode(status), notes)
        _clear(notes, why)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _ended(worker: int, heard: int, alive: int, notes: Path) -> tuple[int, str]:
    """Wait; return the exit code, and why the worker is to end: "" if it has."""
    poll = select.poll()
    poll.register(heard, select.POLLIN)
    poll.register(alive, select.POLLIN)
    if _is_pipe(_STDOUT):
        # That nobody reads it is told in any case.
        poll.register(_STDOUT, 0)
    while True:
        ready = dict(poll.poll())
        if alive in ready:
            return 0, ""
        if heard in ready:
            number = (os.read(heard, 1) or b"\0")[0]
            if not number:
                return 1, "stopped, since the process that was started is dead"
            if _name(number) in _STOPS:
                return 128 + number, f"stopped by {_name(number)}"
            is_pause = number == signal.SIGTSTP
            os.killpg(worker, signal.SIGSTOP if is_pause else signal.SIGCONT)
        elif SHOWN in noted(notes):
            # The worker finds out itself, and ends as if all had been read.
            poll.unregister(_STDOUT)
        else:
            return _CLOSED_PIPE, "stopped, since nobody reads the standard output"


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _own_end(code: int, notes: Path) -> tuple[int, str]:
    """Return the exit code for a worker that ended by itself, and how if it died."""
    if code >= 0:
        return code, ""
    steps = noted(notes).get(STEP, [["starting"]])
    return 1, (
        f"TensorFlow ended the process ({_name(-code)}) while {steps[-1][0]} "
        "(--verbose shows what it said)"
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _clear(notes: Path, why: str) -> None:
    """Remove all that a dead worker left; tell why it ended, if not by itself."""
    if why:
        _kill_others(notes)
    found = noted(notes)
    shutil.rmtree(notes.parent, ignore_errors=True)
    if not why:
        return
    for made in found.get(MADE, ()):
        remove_made(*map(Path, made))
    for (folder,) in found.get(FOLDER, ()):
        with suppress(OSError):
            Path(folder).rmdir()
    moved = dict(found.get(MOVED, ()))
    whole = [f"'{path}'" for path in moved if was_moved(Path(path), moved[path])]
    told = ", ".join(whole[:_SHOWN_FILES])
    if len(whole) > _SHOWN_FILES:
        told += f" and {len(whole) - _SHOWN_FILES} more"
    cleared = _SHOW_CURSOR if os.isatty(_STDERR) else ""
    line = f"{cleared}geutil: {why}; {told or 'nothing'} was written"
    # The terminal may be gone, and whoever reads.
    with suppress(OSError):
        os.write(_STDERR, f"{line}\n".encode())


def _kill_others(notes: Path) -> None:
    """Kill processes that a worker started outside its group, where it noted them."""
    mark = f"{VARIABLE}={notes}".encode()
    end = time.monotonic() + _DYING
    while time.monotonic() < end:
        others = [
            int(place.name)
            for place in Path("/proc").glob("[0-9]*")
            if mark in _environment(place)
        ]
        if not others:
            return
        for other in others:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(_POLL)


def _environment(process: Path) -> list[bytes]:
    """Return the variables that a process was started with, if they can be read."""
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


class _Output(FileIO):
    """The standard output, which notes its first write; whoever reads may leave."""

    _is_noted = False

    def write(self, data: Any) -> int:
        if not self._is_noted:
            note(SHOWN)
            self._is_noted = True
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def _hold_back(*, everything: bool) -> None:
    """Give Python the standard output and that of errors under numbers of its own.

    Args:
        everything: whether C++, which knows them as 1 and 2, writes to nowhere.
    """
    sys.stdout = _stream(_Output(os.dup(_STDOUT), "w"), sys.stdout)
    sys.stderr = _stream(FileIO(os.dup(_STDERR), "w"), sys.stderr)
    if everything:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (_STDOUT, _STDERR):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _stream(file: FileIO, like: Any) -> TextIOWrapper:
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
    )
