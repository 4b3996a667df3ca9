"""HDF5 files, read in a process of their own: a damaged one can hang or end it.

`python -m geutil.model.files.hdf5 PATH` is that process: it prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from geutil.errors import ModelError

_SECONDS = 10
_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError)


class Hdf5File(NamedTuple):
    """What is read of an HDF5 file.

    Attributes:
        config: the configuration of the model, as JSON; None if there is none.
        version: the version of Keras that wrote it.
        bytes_weights: what its datasets take.
        outside: its links to other files and the datasets whose data lie in others:
            the name, "external link" or "external data", and the file.
    """

    config: str | None
    version: str
    bytes_weights: int
    outside: list[tuple[str, str, str]]


def read_hdf5(file: Path) -> Hdf5File:
    """Read an HDF5 file in another process.

    Raises:
        ModelError: it is none, it is damaged, or takes more than 10 seconds to read.

    Cost: linear in its groups and datasets, and a third of a second for the process;
        the last one is remembered.
    """
    try:
        told = file.stat()
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    return _read_elsewhere(file, told.st_mtime_ns, told.st_size)


@lru_cache(maxsize=1)
def _read_elsewhere(file: Path, changed: int, size: int) -> Hdf5File:
    del changed, size
    command = [sys.executable, "-m", __name__, str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"'{file}' is no whole HDF5 file: it is not read within {_SECONDS} s"
        ) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its reader ended with {done.returncode}"
        raise ModelError(f"'{file}' is no whole HDF5 file: {reason}")
    return Hdf5File(*json.loads(done.stdout))


def _read(file: str) -> Hdf5File:
    import h5py

    with h5py.File(file) as opened:
        config = opened.attrs.get("model_config")
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
                    if item.external:
                        source = str(item.external[0][0])
                        outside.append((name, "external data", source))
                elif isinstance(item, h5py.Group) and isinstance(link, h5py.HardLink):
                    waiting.append((item, name))
    if isinstance(config, bytes):
        config = config.decode()
    return Hdf5File(config, version, sum(sizes), outside)


def _members(group: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the members of a group: names, what they are, and how they are linked.

    What lies in other files is not opened.
    """
    import h5py

    for key in group:
        link = group.get(key, getlink=True)
        inside = not isinstance(link, h5py.ExternalLink)
        yield f"{path}/{key}", group.get(key) if inside else None, link


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(_read(sys.argv[1])))
    except _FAULTS as error:
        sys.exit(f"{error}")
