"""What a `.keras` file says of itself; no Keras object is made."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.files.inspection import Inspection, LayerInfo

KERAS = "Keras"
_CONFIG, _METADATA = "config.json", "metadata.json"
_WEIGHTS = ".weights.h5"
_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    # A compression that Python lacks, encryption, an end that comes too early.
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    # JSON: no JSON, no text, or nested too deeply (a RuntimeError).
    ValueError,
)


def inspect_keras(file: Path) -> Inspection:
    """Tell what a `.keras` file is: its Keras version, its layers, its size.

    Args:
        file: a `.keras` file.

    Raises:
        ModelError: it is no such file, or it is damaged.

    Cost: linear in the configuration; weights are not read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if _CONFIG not in names:
                raise ModelError(f"it holds no {_CONFIG}, so it is no Keras model")
            config = json.loads(archive.read(_CONFIG))
            metadata = json.loads(archive.read(_METADATA)) if _METADATA in names else {}
            weights = sum(
                entry.compress_size
                for entry in archive.infolist()
                if entry.filename.endswith(_WEIGHTS)
            )
    except ModelError as error:
        raise ModelError(f"'{file}': {error}") from error
    except _FAULTS as error:
        raise ModelError(
            f"'{file}' is no whole .keras file, which is a zip archive: {error}"
        ) from error
    return Inspection(
        KERAS,
        file,
        version=str(_item(metadata, "keras_version") or ""),
        layers=tuple(_layers(config)),
        bytes_total=file.stat().st_size,
        bytes_variables=weights,
    )


def _layers(config: Any) -> list[LayerInfo]:
    """Return the layers of a model, those of models within it in their place."""
    found = []
    pending = [config]
    while pending:
        item = pending.pop()
        inner = _item(_item(item, "config"), "layers")
        if isinstance(inner, list):
            pending += reversed(inner)
        else:
            name = _item(_item(item, "config"), "name") or _item(item, "name")
            found.append(LayerInfo(str(name or ""), str(_item(item, "class_name"))))
    return found


def _item(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
