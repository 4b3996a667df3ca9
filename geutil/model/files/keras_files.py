"""What a file of Keras says of itself; no Keras object is made."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.files.inspection import Inspection, LayerInfo

KERAS = "Keras"
KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
_CONFIG, _METADATA = "config.json", "metadata.json"
_WEIGHTS = ".weights.h5"
_CODE = ("Lambda", "__lambda__")
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
    """Tell what a file of Keras is: its Keras version, its layers, its size.

    Args:
        file: a `.keras` or HDF5 file.

    Raises:
        ModelError: it is no such file, or it is damaged.

    Cost: linear in the configuration; weights are not read.
    """
    if file.suffix == ".keras":
        config, version, weights = _in_archive(file)
    else:
        config, version, weights = _in_hdf5(file)
    return Inspection(
        KERAS,
        file,
        version=version,
        layers=tuple(_layers(config)),
        bytes_total=file.stat().st_size,
        bytes_variables=weights,
    )


def refuse_code(file: Path) -> None:
    """Refuse an HDF5 file whose layers hold code; not every Keras does that itself.

    Raises:
        ModelError: it holds code, or no model.
    """
    config, _, _ = _in_hdf5(file)
    waiting = [config]
    while waiting:
        item = waiting.pop()
        if _item(item, "class_name") in _CODE:
            raise ModelError(
                f"'{file}' holds code of Python (a Lambda layer), which geutil does "
                "not run: load it with Keras if you trust it, and pass the model"
            )
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _in_archive(file: Path) -> tuple[Any, str, int]:
    """Return the configuration, the version, and the bytes of the weights."""
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
    return config, str(_item(metadata, "keras_version") or ""), weights


def _in_hdf5(file: Path) -> tuple[Any, str, int]:
    """Return the configuration, the version, and the bytes of the weights."""
    import h5py

    sizes: list[int] = []

    def count(_: str, item: Any) -> None:
        sizes.append(getattr(item, "nbytes", 0))

    try:
        with h5py.File(file) as opened:
            told = opened.attrs.get("model_config")
            version = opened.attrs.get("keras_version", "")
            opened.visititems(count)
        config = None if told is None else json.loads(told)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"'{file}' is no whole HDF5 file: {error}") from error
    if config is None:
        raise ModelError(
            f"'{file}' holds weights and no model: make the model, load them with its "
            "load_weights, and pass the model"
        )
    return config, str(version), sum(sizes)


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
