"""The index of a checkpoint: the tensors that it lists, read without TensorFlow.

An index is a table of sorted keys, as LevelDB writes them: blocks of entries, each of
them with a checksum, a block that lists the blocks, and a footer that says where that
one lies. TensorFlow writes them uncompressed. The values of tensors lie in other files,
the shards, which are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from geutil.errors import ModelError
from geutil.model.files import wire
from geutil.model.files.wire import message_class

_FOOTER = 48
"""Bytes at the end of a LevelDB table: two handles of up to 20, and the magic."""
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = 5
"""Bytes behind each block: its type, and a CRC of 32 bits."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")
_PLAIN = 0
"""The type of a block that is not compressed."""
_SLICE = b"\0"
"""Begins the keys of parts of variables, which are listed whole as well."""


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor that a checkpoint holds."""

    name: str
    dtype: str | None  # The name of its type; None for one that is not known here.
    shape: tuple[int, ...]


def variables_prefix(folder: Path) -> Path:
    """Return the prefix of the checkpoint's files in a SavedModel's directory."""
    return folder / "variables" / "variables"


def has_checkpoint(prefix: Path) -> bool:
    """Tell whether there is any file of the checkpoint."""
    return prefix.parent.is_dir() and any(prefix.parent.glob(prefix.name + ".*"))


def checked_index(prefix: Path) -> Path:
    """Return the index of a checkpoint whose files are all there."""
    index = prefix.with_name(prefix.name + ".index")
    if not index.is_file():
        raise ModelError(f"'{index}' is missing: the variables have no index")
    with index.open("rb") as file:
        size = file.seek(0, 2)
        if size < _FOOTER:
            raise ModelError(f"'{index}' is truncated: it has {size} bytes")
        file.seek(size - _FOOTER)
        _block_of_blocks(file.read(_FOOTER), size, index)
    _check_shards(prefix)
    return index


def entries(prefix: Path) -> list[CheckpointEntry]:
    """Return the entries of the index, by name."""
    index = checked_index(prefix)
    entry_class = message_class("BundleEntryProto")
    found = []
    try:
        with wire.mapped(index) as data:
            footer = data[len(data) - _FOOTER :]
            start, length = _block_of_blocks(footer, len(data), index)
            for _, handle in _pairs(_block(data, start, length)):
                at, end = wire.varint(handle, 0, len(handle))
                size, _ = wire.varint(handle, end, len(handle))
                for key, value in _pairs(_block(data, at, size)):
                    # The empty key is that of the header.
                    if key and not key.startswith(_SLICE):
                        entry = wire.parsed(entry_class, value)
                        found.append(_entry(key.decode(), entry))
    except (ModelError, UnicodeDecodeError) as error:
        raise ModelError(f"'{index}' is damaged: {error}") from error
    return found


def _entry(name: str, entry: Any) -> CheckpointEntry:
    dims = tuple(dim.size for dim in entry.shape.dim)
    return CheckpointEntry(name, wire.type_name(entry.dtype), dims)


def _block_of_blocks(footer: bytes, size: int, index: Path) -> tuple[int, int]:
    """Return where the block lies that lists the blocks."""
    # Nothing protects the footer, as a checksum does the blocks: who believed it would
    # allocate as much as it says.
    if not footer.endswith(_MAGIC):
        raise ModelError(f"'{index}' is no index of a checkpoint, or is truncated")
    at = start = length = 0
    for _ in ("blocks' metadata", "blocks"):
        start, at = wire.varint(footer, at, _FOOTER)
        length, at = wire.varint(footer, at, _FOOTER)
        if start + length + _TRAILER > size:
            raise ModelError(
                f"'{index}' is damaged: it points to {length} bytes at {start}, but "
                f"has {size}"
            )
    return start, length


def _block(data: wire.Buffer, start: int, length: int) -> bytes:
    """Return the contents of a block, checked by its checksum."""
    end = start + length
    if end + _TRAILER > len(data):
        raise ModelError(f"a block of {length} bytes at {start} ends behind the file")
    kind = data[end]
    if kind != _PLAIN:
        raise ModelError(f"the block at {start} is compressed, by type {kind}")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if stored != _masked(_crc32c(data[start : end + 1])):
        raise ModelError(f"the checksum of the block at {start} is wrong")
    return data[start:end]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block; a key omits the shared prefix."""
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (count + 1)
    if end < 0:
        raise ModelError("a block is shorter than the list of its places")
    at, key = 0, b""
    while at < end:
        shared, at = wire.varint(block, at, end)
        fresh, at = wire.varint(block, at, end)
        size, at = wire.varint(block, at, end)
        if shared > len(key) or at + fresh + size > end:
            raise ModelError(f"an entry at {at} is longer than its block")
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + size]
        at += size


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli's polynomial (RFC 3720)."""
    table, value = _crc_table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    """Return a checksum as LevelDB stores it."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _check_shards(prefix: Path) -> None:
    numbers_by_count: dict[int, set[int]] = {}
    for path in prefix.parent.glob(prefix.name + ".data-*"):
        match = _SHARD.search(path.name)
        if match:
            numbers_by_count.setdefault(int(match[2]), set()).add(int(match[1]))
    if not numbers_by_count:
        raise ModelError(f"the variables' values are missing: no '{prefix}.data-*'")
    for count, numbers in numbers_by_count.items():
        missing = sorted(set(range(count)) - numbers)
        if missing and len(numbers_by_count) == 1:
            raise ModelError(
                f"'{prefix}.data-{missing[0]:05d}-of-{count:05d}' is missing"
            )
