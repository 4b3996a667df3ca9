"""Loading.

Models by TensorFlow, once their files and checkpoints are known to be whole.

Only the index is read, never the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.protos import GraphDef, SavedModel
from geutil.graph.types import Graph
from geutil.model.files import checkpoint_index, reading, validation
from geutil.model.files.reading import PathLike


def open_checkpoint(prefix: Path) -> Any:
    """Check the files of a checkpoint, and open its index."""
    index = checkpoint_index.checked_index(prefix)
    try:
        return tf.train.load_checkpoint(str(prefix))
    except Exception as error:  # TensorFlow raises several kinds, RuntimeError too.
        raise ModelError(f"'{index}' is damaged: {error}") from error


def load_saved_model(path: PathLike, tags: Iterable[str] | None = None) -> Any:
    """Load a SavedModel, checked before.

    Args:
        path: the directory of the SavedModel.
        tags: exactly the tags of the MetaGraph; None means "serve", or the only one
            there is.

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

    Example:
        >>> load_graph_def("testdata/cond_v1.pbtxt").get_operations()[0].name
        'x'
    """
    graph_def = reading.read_graph_def(path)
    validation.check_graph_def(graph_def, f"'{path}'")
    return import_graph_def(graph_def, f"'{path}'")


def import_graph_def(graph_def: GraphDef, what: str) -> Graph:
    """Import a GraphDef that passed `check_graph_def` into a new graph."""
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.import_graph_def(graph_def, name="")
    except Exception as error:  # The importer raises several kinds.
        raise ModelError(f"{what} cannot be imported: {error}") from error
    return graph


def check_saved_model(saved_model: SavedModel, folder: Path) -> None:
    """Check a SavedModel's graphs and its checkpoint."""
    for meta_graph in saved_model.meta_graphs:
        tags = ", ".join(meta_graph.meta_info_def.tags)
        validation.check_graph_def(
            meta_graph.graph_def, f"'{folder}', MetaGraph '{tags}'"
        )
    prefix = checkpoint_index.variables_prefix(folder)
    if checkpoint_index.has_checkpoint(prefix) or any(
        map(_has_variables, saved_model.meta_graphs)
    ):
        open_checkpoint(prefix)


def _has_variables(meta_graph: Any) -> bool:
    nodes = meta_graph.object_graph_def.nodes
    return any(node.WhichOneof("kind") == "variable" for node in nodes)
