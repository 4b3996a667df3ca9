"""The formats that models are written in, and the names of files that say which.

No TensorFlow is needed here: the command refuses a name before it starts any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

DIRECTORY = "saved_model"
"""The one format that is a directory; a name without any of the suffixes means it."""
BY_SUFFIX: Mapping[str, str] = MappingProxyType(
    {".pb": "graph_def", ".pbtxt": "pbtxt", ".tflite": "tflite"}
)
"""The format that each suffix names, in lower case."""
_NOT_WRITTEN = frozenset(
    (
        ".ckpt",
        ".h5",
        ".hdf5",
        ".json",
        ".keras",
        ".mlmodel",
        ".mlpackage",
        ".npy",
        ".npz",
        ".onnx",
        ".pkl",
        ".pt",
        ".pth",
        ".safetensors",
        ".tar",
        ".zip",
    )
)
"""Suffixes of what others write. Any other one may belong to a directory's name."""
_WRITTEN = f"a SavedModel directory, or a {', '.join(BY_SUFFIX)} file"
_SAVED_MODELS = ("saved_model.pb", "saved_model.pbtxt")


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
    """Return why what is at a path is not replaced by a model; None if it is."""
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
    return None
