"""The archive behind a TFLite file: labels and vocabularies, packed as metadata.

Libraries for metadata append a zip archive to a file. A flatbuffer does not know its
own end, so the archive is found from the end of the file, as zip readers find it. Its
directory counts from the start of the file: behind other weights it has other places.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from geutil.tflite.parts import Array

_END = struct.Struct("<4s4H2IH")
"""The record at the end: signature, disks, entries twice, directory, comment."""
_END_MARK, _ENTRY_MARK, _FILE_MARK = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_ENTRY = struct.Struct("<4s24x3H8xI")
"""An entry of the directory: signature, three lengths, the place of its file."""


def find_archive(data: Array) -> Array | None:
    """Return the bytes of the archive at the end of a file; None without one."""
    try:
        start, _ = _places(data)
    except (struct.error, ValueError):
        return None
    return data[start:]


def moved_archive(archive: Array, place: int) -> bytes:
    """Return an archive as it has to be written at a place of a file."""
    start, entries = _places(archive)
    moved = bytearray(archive.tobytes())
    directory = len(moved) - _END.size - _directory_size(archive)
    for at, file in entries:
        struct.pack_into("<I", moved, at + 42, file - start + place)
    struct.pack_into("<I", moved, len(moved) - 6, directory - start + place)
    return bytes(moved)


def _directory_size(data: Array) -> int:
    fields = _END.unpack(data[len(data) - _END.size :].tobytes())
    mark, *_, size, _, comment = fields
    if mark != _END_MARK or comment:
        raise ValueError("no archive ends here")
    return int(size)


def _places(data: Array) -> tuple[int, list[tuple[int, int]]]:
    """Return where an archive starts; for each entry its place and that of its file."""
    end = len(data) - _END.size
    if end < 0:
        raise ValueError("too short for an archive")
    size = _directory_size(data)
    *_, stated, _ = _END.unpack(data[end:].tobytes())
    directory = end - size
    # Some writers count from the start of the archive, not of the file.
    shift, entries, at = directory - stated, [], directory
    while at < end:
        mark, *lengths, place = _ENTRY.unpack(_piece(data, at, _ENTRY.size))
        file = place + shift
        if mark != _ENTRY_MARK or _piece(data, file, 4) != _FILE_MARK:
            raise ValueError("the directory of the archive is damaged")
        entries.append((at, file))
        at += 46 + sum(lengths)
    if directory < 0 or at != end:
        raise ValueError("the directory of the archive is damaged")
    return min([directory, *(file for _, file in entries)]), entries


def _piece(data: Array, start: int, size: int) -> bytes:
    if start < 0:
        raise ValueError("a place before the file")
    piece: Any = data[start : start + size]
    return bytes(np.asarray(piece))
