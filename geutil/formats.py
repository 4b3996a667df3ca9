"""The formats that models are written in, and the names of files that say which.

No TensorFlow is needed here: the command refuses a name before it starts any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from geutil.errors import Words

DIRECTORY = "saved_model"
"""The one format that is a directory; a name without any of the suffixes means it."""
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
    """Tell whether a file is a TFLite file, by its name or its first bytes."""
    if file.suffix.lower() == TFLITE_SUFFIX:
        return True
    with file.open("rb") as opened:
        return opened.read(8)[4:] == _TFLITE
