"""The checkpoint of a SavedModel: is it whole, and what does its index list?

Only the index is read, never the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.files.wire import varint

_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = 5
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Entry:
    """One tensor that a checkpoint holds.

    Attributes:
        name: its key in the checkpoint.
        dtype: its type.
        shape: its shape.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int, ...]


def variables_prefix(folder: Path) -> Path:
    """Return the prefix of the checkpoint's files in a SavedModel's directory."""
    return folder / "variables" / "variables"


def has_checkpoint(prefix: Path) -> bool:
    """Tell whether there is any file of the checkpoint."""
    return prefix.parent.is_dir() and any(prefix.parent.glob(prefix.name + ".*"))


def open_checkpoint(prefix: Path) -> Any:
    """Check the files of a checkpoint, and open its index.

    Args:
        prefix: the path that the names of all its files begin with.

    Returns:
        A `tf.train.CheckpointReader`.

    Raises:
        ModelError: the index or a shard is missing, or the index is damaged.

    Cost: linear in the index; the shards are not read.
    """
    index = prefix.with_name(prefix.name + ".index")
    if not index.is_file():
        raise ModelError(f"'{index}' is missing: the variables have no index")
    _check_footer(index)
    _check_shards(prefix)
    try:
        return tf.train.load_checkpoint(str(prefix))
    except Exception as error:  # TensorFlow raises several kinds, RuntimeError too.
        raise ModelError(f"'{index}' is damaged: {error}") from error


def entries(prefix: Path) -> list[Entry]:
    """Return what the index lists, by name.

    Raises:
        ModelError: see `open_checkpoint`.
    """
    reader = open_checkpoint(prefix)
    try:
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    except Exception as error:  # As above.
        raise ModelError(f"the index of '{prefix}' is damaged: {error}") from error
    return [Entry(name, dtypes[name], tuple(shapes[name])) for name in sorted(shapes)]


def _check_footer(index: Path) -> None:
    """Check where the index says that its blocks lie.

    A checksum protects the blocks, but nothing this: TensorFlow would allocate as much
    as it says.
    """
    size = index.stat().st_size
    if size < _FOOTER:
        raise ModelError(f"'{index}' is truncated: it has {size} bytes")
    with index.open("rb") as file:
        file.seek(size - _FOOTER)
        footer = file.read(_FOOTER)
    if not footer.endswith(_MAGIC):
        raise ModelError(f"'{index}' is no index of a checkpoint, or is truncated")
    at = 0
    for _ in ("blocks' metadata", "blocks"):
        start, at = varint(footer, at, _FOOTER)
        length, at = varint(footer, at, _FOOTER)
        if start + length + _TRAILER > size:
            raise ModelError(
                f"'{index}' is damaged: it points to {length} bytes at {start}, but "
                f"has {size}"
            )


def _check_shards(prefix: Path) -> None:
    found: dict[int, set[int]] = {}
    for path in prefix.parent.glob(prefix.name + ".data-*"):
        match = _SHARD.search(path.name)
        if match:
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    if not found:
        raise ModelError(f"the variables' values are missing: no '{prefix}.data-*'")
    for count, numbers in found.items():
        missing = sorted(set(range(count)) - numbers)
        if missing and len(found) == 1:
            raise ModelError(
                f"'{prefix}.data-{missing[0]:05d}-of-{count:05d}' is missing"
            )
