"""Files and directories written whole, or not at all."""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from geutil.errors import GeutilError, ModelError, Words
from geutil.progress import MADE, MOVED, note

# Linux's number for the working directory (fcntl.h).
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Linux: `renameat2(2)`."""


def check_free(
    path: Path, overwrite: bool, error: type[GeutilError] = ModelError
) -> None:
    """Refuse a path where something is that may not be overwritten."""
    if _exists(path) and not overwrite:
        raise error(
            "exists",
            subject=f"'{path}'",
            remedy=f"pass {Words('overwrite=True')} to replace it",
        )


@contextmanager
def written_atomically(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a new place beside `path` to write to, and move it there at the end.

    When the block raises or the process dies, what was at `path` is whole and in its
    place. Where the system cannot swap two paths at once (not on Linux), a directory is
    replaced with two renames: a crash between them leaves the old one whole beside
    its place, under a name that ends in `.old`.

    The new place is in a hidden folder, whose lock ends with the process. One that a
    killed process left is removed when the next one writes to `path`; at once, where
    somebody reads the notes of the process (`geutil.progress`).

    Args:
        path: where the file or directory will be.
        overwrite: whether to replace what is there.

    Raises:
        ModelError: there is something and `overwrite` is false; or the parent is
            missing; or a file was written where there is a directory.
        OSError: the disk is full, or writing is forbidden.
    """
    check_free(path, overwrite)
    if not path.parent.is_dir():
        raise ModelError(f"there is no directory '{path.parent}' to write '{path}' to")
    with suppress(OSError):
        _clear_abandoned(path)
    # In the same directory, so that moving it is a rename within one file system.
    work = path.absolute().parent / f".{path.name}.{secrets.token_hex(4)}"
    old = work / f"{path.name}.old"
    note(MADE, str(work), str(old))
    work.mkdir(0o700)
    try:
        with _locked(work / f"{path.name}.lock"):
            new = work / path.name
            yield new
            if new.is_file() and _is_directory(path):
                raise ModelError(
                    f"'{path}' is a directory, which a file does not replace; name a "
                    "file in it, or remove it"
                )
            _sync(new)
            note(MOVED, str(path.absolute()), new.stat().st_ino)
            _move_in(new, path, old)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock on a file, which is there only once it is locked."""
    unlocked = lock.with_name(f"{lock.name}.new")
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR)
    try:
        if _lock(descriptor):
            unlocked.rename(lock)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file; return False where another has, or the system cannot."""
    try:
        import fcntl  # Not on Windows.

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def remove_made(made: Path, old: Path | None = None) -> None:
    """Remove the temporary files of a killed process, by its notes.

    Args:
        made: a file or folder.
        old: where the old file is, taken away for a new one, if it was killed just
            then; it is kept.
    """
    if old is not None and _exists(old):
        return
    if made.is_dir():
        shutil.rmtree(made, ignore_errors=True)
    else:
        made.unlink(missing_ok=True)


def was_moved(path: Path, inode: int) -> bool:
    """Tell whether the output of a killed process is in its place, by its notes."""
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def _clear_abandoned(path: Path) -> None:
    """Remove the folders that processes left which were killed while they wrote."""
    for work in path.parent.glob(f".{glob.escape(path.name)}.*"):
        lock = work / f"{path.name}.lock"
        if not _exists(lock) and _was_never_locked(work):
            shutil.rmtree(work, ignore_errors=True)
            continue
        # The old one, taken away before a crash between two renames, is kept.
        if not lock.is_file() or _exists(work / f"{path.name}.old"):
            continue
        descriptor = os.open(lock, os.O_RDWR)
        try:
            if _lock(descriptor):
                shutil.rmtree(work, ignore_errors=True)
        finally:
            os.close(descriptor)


_SOON = 60.0
"""In so many seconds a process that makes a folder locks it, by far."""


def _was_never_locked(work: Path) -> bool:
    """Tell whether a process was killed after it made a folder and before it locked."""
    try:
        inside = [p for p in work.iterdir() if not p.name.endswith(".lock.new")]
        return not inside and time.time() - work.stat().st_mtime > _SOON
    except OSError:
        return False


def _move_in(new: Path, path: Path, old: Path) -> None:
    if not _exists(path) or not (new.is_dir() or _is_directory(path)):
        new.replace(path)
    elif not _exchanged(new, path):
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
    _sync_directory(path.parent)


def _exchanged(a: Path, b: Path) -> bool:
    """Swap two paths at once; return False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done: int = renameat2(
        _AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE
    )
    return done == 0


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _sync(path: Path) -> None:
    """Wait until a file, or all files below a directory, are on the disk."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
