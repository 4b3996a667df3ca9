"""Files of models: their formats, and files written whole or not at all.

A format goes by names of files and first bytes.
"""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from geutil.errors import GeutilError, ModelError, Words
from geutil.progress import MADE, MOVED, note

DIRECTORY = "saved_model"
"""The one format that is a directory; a name without any of the suffixes means it."""
SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
"""The files of a SavedModel that hold its graph: one of them is there."""
BY_SUFFIX: Mapping[str, str] = MappingProxyType(
    {".pb": "graph_def", ".pbtxt": "pbtxt", ".tflite": "tflite"}
)
"""The format that each suffix names, in lower case."""
_NOT_WRITTEN = frozenset(
    (
        ".7z",
        ".bin",
        ".bz2",
        ".ckpt",
        ".csv",
        ".engine",
        ".ggml",
        ".gguf",
        ".gz",
        ".h5",
        ".hdf5",
        ".html",
        ".index",
        ".json",
        ".keras",
        ".md",
        ".meta",
        ".mlmodel",
        ".mlpackage",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".pdmodel",
        ".pdparams",
        ".pkl",
        ".plan",
        ".pt",
        ".pt2",
        ".pth",
        ".safetensors",
        ".tar",
        ".task",
        ".tgz",
        ".txt",
        ".xz",
        ".yaml",
        ".yml",
        ".zip",
        ".zst",
    )
)
"""Suffixes of what others write. Any other one may belong to a directory's name."""
_WRITTEN = f"a SavedModel directory, or a {', '.join(BY_SUFFIX)} file"
_SAVED_MODELS = ("saved_model.pb", "saved_model.pbtxt")
_PARTS = frozenset(
    (
        *_SAVED_MODELS,
        ".DS_Store",
        "assets",
        "assets.extra",
        "debug",
        "fingerprint.pb",
        "keras_metadata.pb",
        "saved_model.cpb",
        "variables",
    )
)
"""The files that TensorFlow and Keras write into the directory of a SavedModel."""


def format_by_name(path: Path) -> str:
    """Return the format that a name says."""
    return BY_SUFFIX.get(path.suffix.lower(), DIRECTORY)


def refusal(path: Path, format: str) -> str | None:
    """Return why a model cannot be written to a path in a format; None if it can.

    Args:
        path: where to; what is there may be replaced, by its like.
        format: the name of a format.
    """
    suffix = path.suffix.lower()
    if suffix in _NOT_WRITTEN:
        return (
            f"'{path}' is called a {suffix} file, which geutil does not write; name "
            f"{_WRITTEN}"
        )
    named = BY_SUFFIX.get(suffix, format)
    if named != format:
        return (
            f"'{path}' is called a file of format '{named}', and '{format}' would be "
            f"written; ask for '{named}', or choose another name"
        )
    if path.exists():
        return _other_kind(path, format)
    return None


def _other_kind(path: Path, format: str) -> str | None:
    """Return why a model cannot replace the file at a path; None if it can."""
    is_directory = path.is_dir()
    if is_directory != (format == DIRECTORY):
        there = "directory" if is_directory else "file"
        new = "directory" if format == DIRECTORY else "file"
        return (
            f"'{path}' is a {there}, and is not replaced by a {new}: remove it first, "
            "or choose another name"
        )
    model_there = any((path / name).exists() for name in _SAVED_MODELS)
    if is_directory and any(path.iterdir()) and not model_there:
        return (
            f"the directory '{path}' holds something else than a model, and is not "
            "replaced: remove it first, or choose another name"
        )
    foreign = [p.name for p in path.iterdir()] if is_directory else []
    foreign = sorted(name for name in foreign if name not in _PARTS)
    if foreign:
        return (
            f"the directory '{path}' also holds '{foreign[0]}', which is no part of a "
            "SavedModel and would be lost: move it away, or choose another name"
        )
    return None


_MAGIC = {
    b"PK\x03\x04": "a zip archive (a .keras file is one: name it so)",
    b"\x89HDF": "an HDF5 file (a model of Keras is one: name it .h5)",
    b"\x1f\x8b": "a gzip archive (unpack it first)",
}
_TFLITE = b"TFL3"
TFLITE_SUFFIX = ".tflite"
_READERS = Words(
    "geutil.model.inspect, geutil.report.view and diff read it, geutil.tflite.open "
    "edits it, and an interpreter such as that of ai_edge_litert runs it",
    key="tflite.open",
)


def foreign_kind(head: bytes) -> str | None:
    """Return the format of a file that cannot be opened, by its first bytes."""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[4:8] == _TFLITE:
        return f"a TensorFlow Lite model ({_READERS})"
    return None


def is_tflite_file(file: Path) -> bool:
    """Return whether a file is a TFLite file, by its name or its first bytes."""
    if file.suffix.lower() == TFLITE_SUFFIX:
        return True
    with file.open("rb") as opened:
        return opened.read(8)[4:] == _TFLITE


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
    """Return whether the output of a killed process is in its place, by its notes."""
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
    """Return whether a process was killed between making a folder and locking it."""
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
