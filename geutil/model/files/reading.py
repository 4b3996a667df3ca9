"""Reads the protos of models from files, and reports a file's faults.

Only functions that parse a proto import TensorFlow.
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

PathLike: TypeAlias = str | os.PathLike[str]

SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_CHUNKED_FILE = "saved_model.cpb"
_REMEDIES = {
    GRAPH_DEF: "read it with geutil.model.files.reading.read_graph_def",
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
