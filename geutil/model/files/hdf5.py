"""HDF5 files, read in a process of their own: a damaged one can hang or end it.

`python -m geutil.model.files.hdf5 PATH` is that process: it prints JSON, of the file,
or of the entries of an archive whose names it reads as JSON.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from geutil.errors import ModelError

_SECONDS = 10
_NAME_LENGTH = 26
"""Where the header of an entry says how long its name is."""
_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError, BadZipFile)


class Hdf5File(NamedTuple):
    """The facts read from an HDF5 file.

    Attributes:
        config: the configuration of the model, as JSON; None if there is none.
        training: that of its training, as JSON; None if there is none.
        version: the version of Keras that wrote it.
        outside: its links to other files and the datasets whose data lie in others: the
            name, "external link", "external data" or "virtual data", and the file.
    """

    config: str | None
    training: str | None
    version: str
    bytes_weights: int
    outside: list[tuple[str, str, str]]


def read_hdf5(file: Path, entries: tuple[str, ...] = ()) -> Hdf5File:
    """Read an HDF5 file in another process.

    Args:
        file: the file.
        entries: if the file is an archive, the entries that are read instead of it.
            Then there is no configuration, and names begin with that of the entry.

    Cost: linear in its groups and datasets, and a third of a second for the process;
        the last one is remembered.
    """
    try:
        told = file.stat()
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    return _read_elsewhere(file, entries, told.st_mtime_ns, told.st_size)


@lru_cache(maxsize=1)
def _read_elsewhere(
    file: Path, entries: tuple[str, ...], changed: int, size: int
) -> Hdf5File:
    del changed, size
    what = f"'{file}': what it holds as weights" if entries else f"'{file}'"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(file)],
            # Names may be longer than arguments can be.
            input=json.dumps(entries).encode(),
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{what} is no whole HDF5 file: it is not read within {_SECONDS} s"
        ) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its reader ended with {done.returncode}"
        raise ModelError(f"{what} is no whole HDF5 file: {reason}")
    return Hdf5File(*json.loads(done.stdout))


def _read_entries(file: str, entries: list[str]) -> Hdf5File:
    total = 0
    outside: list[tuple[str, str, str]] = []
    for entry in entries:
        with ExitStack() as stack:
            found = _read(_entry(file, entry, stack))
        total += found.bytes_weights
        outside += [
            (entry + name, kind, source) for name, kind, source in found.outside
        ]
    return Hdf5File(None, None, "", total, outside)


def _read(file: Any) -> Hdf5File:
    """Return the facts in an open file; a group with two names is read once."""
    import h5py

    with h5py.File(file) as opened:
        config = _text(opened.attrs.get("model_config"))
        training = _text(opened.attrs.get("training_config"))
        version = str(opened.attrs.get("keras_version", ""))
        sizes: list[int] = []
        outside: list[tuple[str, str, str]] = []
        waiting: list[tuple[Any, str]] = [(opened, "")]
        seen = set()
        while waiting:
            group, path = waiting.pop()
            if group.id in seen:
                continue
            seen.add(group.id)
            for name, item, link in _members(group, path):
                if isinstance(link, h5py.ExternalLink):
                    outside.append((name, "external link", str(link.filename)))
                elif isinstance(item, h5py.Dataset):
                    sizes.append(int(item.nbytes))
                    files = dict.fromkeys(str(part[0]) for part in item.external or ())
                    outside += ((name, "external data", other) for other in files)
                    outside += _virtual(item, name)
                elif isinstance(item, h5py.Group) and isinstance(link, h5py.HardLink):
                    waiting.append((item, name))
    return Hdf5File(config, training, version, sum(sizes), outside)


class _Part(io.RawIOBase):
    """A part of a file, as HDF5 reads it: in leaps, which a zip archive is slow at."""

    def __init__(self, handle: BinaryIO, start: int, size: int) -> None:
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence, 0)
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._handle.seek(self._start + self._at)
        data = self._handle.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _entry(file: str, name: str, stack: ExitStack) -> Any:
    """Return an entry of an archive as a file that can be read anywhere."""
    archive = stack.enter_context(ZipFile(file))
    info = archive.getinfo(name)
    with archive.open(name) as opened:
        if info.compress_type != ZIP_STORED:
            copy = stack.enter_context(TemporaryFile())  # noqa: SIM115
            shutil.copyfileobj(opened, copy)
            return copy
    handle = stack.enter_context(Path(file).open("rb"))  # noqa: SIM115
    handle.seek(info.header_offset + _NAME_LENGTH)
    name_length, more = struct.unpack("<2H", handle.read(4))
    start = info.header_offset + _NAME_LENGTH + 4 + name_length + more
    return _Part(handle, start, info.file_size)


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode()
    return None if value is None else str(value)


def _virtual(dataset: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the other files that a virtual dataset is made of."""
    if dataset.is_virtual:
        files = {str(source.file_name) for source in dataset.virtual_sources()}
        yield from ((name, "virtual data", file) for file in sorted(files - {"."}))


def _members(group: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the members of a group: names, items and links.

    Items in other files are not opened.
    """
    import h5py

    for key in group:
        link = group.get(key, getlink=True)
        inside = not isinstance(link, h5py.ExternalLink)
        yield f"{path}/{key}", group.get(key) if inside else None, link


if __name__ == "__main__":
    try:
        named = json.load(sys.stdin)
        told = _read_entries(sys.argv[1], named) if named else _read(sys.argv[1])
        sys.stdout.write(json.dumps(told))
    except _FAULTS as error:
        sys.exit(f"{error}")
