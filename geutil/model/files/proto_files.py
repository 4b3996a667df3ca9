"""Protos of models and indexes of checkpoints, read from files; faults of these files.

Only functions that parse a proto import TensorFlow. The index of a checkpoint is a
table of sorted keys, as LevelDB writes them: blocks of entries, each of them with a
checksum, a block that lists the blocks, and a footer that says where that one lies.
TensorFlow writes them uncompressed. The values of tensors lie in other files, the
shards, which are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geutil.errors import ModelError, Words
from geutil.formats import foreign_kind
from geutil.model.files import wire
from geutil.model.files.wire import GRAPH_DEF, META_GRAPH, SAVED_MODEL, Buffer

if TYPE_CHECKING:
    from geutil.graph.protos import GraphDef, MetaGraphDef, SavedModel
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

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


PathLike: TypeAlias = str | os.PathLike[str]

SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_CHUNKED_FILE = "saved_model.cpb"
_REMEDIES = {
    GRAPH_DEF: "read it with geutil.model.files.proto_files.read_graph_def",
    META_GRAPH: "import it with tf.compat.v1.train.import_meta_graph and pass the "
    "graph, or write its graph_def to a file of its own",
    SAVED_MODEL: "pass the directory that holds it, with the variables beside it",
}
_PREFERRED_TAG = "serve"


def saved_model_file(path: PathLike) -> Path:
    """Return the file in the directory `path` that holds the SavedModel's proto."""
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"'{folder}' does not exist")
    if not folder.is_dir():
        raise ModelError(f"'{folder}' is a file; a SavedModel is a directory")
    for name in SAVED_MODEL_FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / _CHUNKED_FILE).exists():
        raise ModelError(
            f"'{folder}' holds a SavedModel in chunks ({_CHUNKED_FILE}), which geutil "
            f"does not read; accepted: {' or '.join(SAVED_MODEL_FILES)}. Load it with "
            "tf.saved_model.load and save it with its weights as variables"
        )
    raise ModelError(
        f"'{folder}' holds no {' or '.join(SAVED_MODEL_FILES)}, so it is no "
        f"SavedModel; it holds {_listed(sorted(p.name for p in folder.iterdir()))}"
    )


def read_saved_model(path: PathLike) -> SavedModel:
    """Read the proto of a SavedModel; variables and assets stay where they are.

    Cost: linear in the file; twice its size in memory for a moment.

    Example:
        >>> saved_model = read_saved_model("testdata/two_signatures")
        >>> list(saved_model.meta_graphs[0].meta_info_def.tags)
        ['serve']
    """
    file = saved_model_file(path)
    saved_model = _read(file, SAVED_MODEL)
    if not saved_model.meta_graphs:
        raise ModelError(f"'{file}' holds no graph: its SavedModel is empty")
    return saved_model


def read_graph_def(path: PathLike) -> GraphDef:
    """Read a GraphDef from a file.

    Cost: linear in the file; twice its size in memory for a moment.

    Example:
        >>> graph_def = read_graph_def("testdata/cond_v1.pbtxt")
        >>> graph_def.node[0].name
        'x'
    """
    file = Path(path)
    if not file.exists():
        raise ModelError(f"'{file}' does not exist")
    if file.is_dir():
        raise ModelError(f"'{file}' is a directory; a GraphDef is a .pb or .pbtxt file")
    return _read(file, GRAPH_DEF)


def select_meta_graph(
    saved_model: SavedModel, tags: Iterable[str] | None = None
) -> MetaGraphDef:
    """Choose one of the MetaGraphs of a SavedModel, by exactly its tags."""
    # None means the one with the tag "serve" alone, or else the only one there is.
    all_tags = [tuple(m.meta_info_def.tags) for m in saved_model.meta_graphs]
    tag = _PREFERRED_TAG if tags is None else tags
    requested_tags = {tag} if isinstance(tag, str) else set(tag)
    for meta_graph, its_tags in zip(saved_model.meta_graphs, all_tags, strict=True):
        if set(its_tags) == requested_tags:
            return meta_graph
    if tags is None and len(all_tags) == 1:
        return saved_model.meta_graphs[0]
    listed = ", ".join(str(sorted(its_tags)) for its_tags in all_tags) or "none at all"
    if tags is None:
        raise ModelError(
            f"the SavedModel holds several MetaGraphs and none is tagged "
            f"'{_PREFERRED_TAG}' alone; pass the tags of one of them: {listed}"
        )
    raise ModelError(
        f"the SavedModel holds no MetaGraph with the tags {sorted(requested_tags)}; "
        f"it holds {listed}",
        remedy=Words("pass one of these as tags=..."),
    )


def _read(file: Path, expected_kind: str) -> Any:
    data = read_bytes(file)
    if file.suffix in (".pbtxt", ".txt"):
        return _from_text(data, file, expected_kind)
    return _from_binary(data, file, expected_kind)


def read_bytes(file: Path) -> bytes:
    """Return the bytes of `file`."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    if not data:
        raise ModelError(f"'{file}' is empty")
    return data


def what_is(file: Path) -> str:
    """Return the kind of a file, if it is known: for messages."""
    with file.open("rb") as opened:
        kind = foreign_kind(opened.read(16))
    return kind or f"a file, and its suffix '{file.suffix}' says no format"


def check_binary(buffer: Buffer, file: Path, expected_kind: str) -> None:
    """Check which proto a file holds, by the look of it."""
    foreign = foreign_kind(buffer[:16])
    if foreign:
        raise ModelError(f"'{file}' is {foreign}, no {expected_kind}")
    try:
        kind = wire.binary_kind(buffer)
    except ModelError as error:
        hint = wire.text_kind(buffer[:4096].decode(errors="replace"))
        if hint:
            raise ModelError(
                f"'{file}' is a {hint} in text form: name it .pbtxt"
            ) from error
        raise ModelError(f"'{file}' holds no whole {expected_kind}: {error}") from error
    _check_kind(kind, expected_kind, file)


def _check_kind(actual_kind: str | None, expected_kind: str, file: Path) -> None:
    if actual_kind == expected_kind:
        return
    if actual_kind is None:
        raise ModelError(
            f"'{file}' holds no {expected_kind}, nor another proto of a model"
        )
    raise ModelError(
        f"'{file}' holds a {actual_kind}, no {expected_kind}: {_REMEDIES[actual_kind]}"
    )


def _from_binary(data: bytes, file: Path, expected_kind: str) -> Any:
    from geutil.graph import protos

    check_binary(data, file, expected_kind)
    try:
        return getattr(protos, expected_kind).FromString(data)
    except protos.PARSE_ERRORS as error:
        raise ModelError(
            f"'{file}' holds no whole {expected_kind}, it is truncated or damaged: "
            f"{error}"
        ) from error


def _from_text(data: bytes, file: Path, expected_kind: str) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"'{file}' is no text: {error}") from error
    kind = wire.text_kind(text)
    if kind is not None:
        _check_kind(kind, expected_kind, file)
    from geutil.graph import protos

    try:
        return protos.parse_text(text, getattr(protos, expected_kind)())
    except protos.PARSE_ERRORS as error:
        raise ModelError(
            f"'{file}' holds no {expected_kind} in text form: {error}"
        ) from error


def _listed(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "nothing") + more
