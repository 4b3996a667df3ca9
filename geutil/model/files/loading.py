"""Loading.

Models by TensorFlow, once their files and checkpoints are known to be whole.

Only the index is read, never the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.protos import GraphDef, SavedModel
from geutil.graph.types import Graph
from geutil.model.files import reading, validation, wire
from geutil.model.files.reading import PathLike

_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = 5
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class CheckpointEntry:
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


def entries(prefix: Path) -> list[CheckpointEntry]:
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
    return [
        CheckpointEntry(name, dtypes[name], tuple(shapes[name]))
        for name in sorted(shapes)
    ]


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
        start, at = wire.varint(footer, at, _FOOTER)
        length, at = wire.varint(footer, at, _FOOTER)
        if start + length + _TRAILER > size:
            raise ModelError(
                f"'{index}' is damaged: it points to {length} bytes at {start}, but "
                f"has {size}"
            )


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


def load_saved_model(path: PathLike, tags: Iterable[str] | None = None) -> Any:
    """Load a SavedModel, checked before.

    Args:
        path: the directory of the SavedModel.
        tags: exactly the tags of the MetaGraph; None stands for "serve", or for the
            only one there is.

    Returns:
        What `tf.saved_model.load` returns.

    Raises:
        ModelError: the directory holds no whole SavedModel, or TensorFlow refuses it;
            TensorFlow's error is the cause.

    Cost: linear in the model, beside what `tf.saved_model.load` takes.

    Example:
        >>> loaded = load_saved_model("testdata/two_signatures")
        >>> sorted(loaded.signatures)
        ['decode', 'encode']
    """
    folder = Path(path)
    saved_model = reading.read_saved_model(folder)
    chosen = list(reading.select_meta_graph(saved_model, tags).meta_info_def.tags)
    check_saved_model(saved_model, folder)
    del saved_model
    try:
        return tf.saved_model.load(str(folder), tags=chosen)
    except Exception as error:  # The loader raises whatever its Python code meets.
        reason = str(error).strip() or type(error).__name__
        raise ModelError(f"'{folder}' cannot be loaded: {reason}") from error


def load_graph_def(path: PathLike) -> Graph:
    """Import a GraphDef from a file into a new graph, checked before.

    Args:
        path: a `.pb` file (binary) or a `.pbtxt` file (text).

    Returns:
        A `tf.Graph` with the nodes under their own names.

    Raises:
        ModelError: the file holds no whole GraphDef, or TensorFlow refuses it;
            TensorFlow's error is the cause.

    Cost: linear in the graph, beside what `tf.import_graph_def` takes.

    Example:
        >>> load_graph_def("testdata/cond_v1.pbtxt").get_operations()[0].name
        'x'
    """
    graph_def = reading.read_graph_def(path)
    validation.check_graph_def(graph_def, f"'{path}'")
    return import_graph_def(graph_def, f"'{path}'")


def import_graph_def(graph_def: GraphDef, what: str) -> Graph:
    """Import a GraphDef that passed `check_graph_def` into a new graph.

    Args:
        graph_def: the graph with its library.
        what: how messages call it.

    Raises:
        ModelError: TensorFlow refuses it; TensorFlow's error is the cause.

    Cost: that of `tf.import_graph_def`.
    """
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.import_graph_def(graph_def, name="")
    except Exception as error:  # The importer raises several kinds.
        raise ModelError(f"{what} cannot be imported: {error}") from error
    return graph


def check_saved_model(saved_model: SavedModel, folder: Path) -> None:
    """Check a SavedModel's graphs and its checkpoint.

    Args:
        saved_model: the proto.
        folder: the directory that it comes from.

    Raises:
        ModelError: a graph cannot be imported, or files of the checkpoint are missing
            or damaged.

    Cost: linear in the graphs and the checkpoint's index; no values are read.
    """
    for meta_graph in saved_model.meta_graphs:
        tags = ", ".join(meta_graph.meta_info_def.tags)
        validation.check_graph_def(
            meta_graph.graph_def, f"'{folder}', MetaGraph '{tags}'"
        )
    prefix = variables_prefix(folder)
    if has_checkpoint(prefix) or any(map(_has_variables, saved_model.meta_graphs)):
        open_checkpoint(prefix)


def _has_variables(meta_graph: Any) -> bool:
    nodes = meta_graph.object_graph_def.nodes
    return any(node.WhichOneof("kind") == "variable" for node in nodes)
