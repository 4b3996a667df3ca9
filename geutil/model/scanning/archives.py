"""The powers of files of Keras and TFLite."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from geutil.model.files.hdf5 import read_hdf5
from geutil.model.files.keras_files import configuration
from geutil.model.files.tflite_inspection import read_tflite
from geutil.model.scanning import op_table
from geutil.model.scanning.report import LOADED, MAIN, RUN, Power

_CONFIG = "config.json"
_CODE = frozenset(
    (
        *("Lambda", "__lambda__", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
        *("TFSMLayer", "function"),
    )
)
"""Classes that hold code, or load it from elsewhere, when they are deserialized."""
_OWN = frozenset(("keras", "tensorflow", "tf_keras", "builtins"))
"""The packages that a configuration names classes of; others would be imported."""


def powers_of_keras(file: Path) -> tuple[list[Power], int]:
    """Return the powers of a `.keras` or HDF5 file, and how many layers it has.

    Raises:
        ModelError: it is no such file, or it is damaged.
    """
    config, _, _ = configuration(file)
    place = _CONFIG if file.suffix == ".keras" else "its configuration"
    entries = list(_in_config(config, place))
    if file.suffix == ".keras":
        entries += _in_entries(file)
    else:
        entries += _in_links(file)
    return entries, sum(1 for item, _ in _items(config) if "class_name" in item)


def _items(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all dictionaries of a configuration, with the path to each."""
    waiting: list[tuple[Any, str]] = [(config, "")]
    while waiting:
        item, path = waiting.pop()
        if isinstance(item, dict):
            yield item, path
            waiting += [(value, f"{path}.{key}") for key, value in item.items()]
        elif isinstance(item, list):
            waiting += [(value, path) for value in item]


def _in_config(config: Any, place: str) -> Iterator[Power]:
    for item, path in _items(config):
        kind = item.get("class_name")
        if not isinstance(kind, str):
            continue
        inner = item.get("config")
        name = item.get("name")
        if isinstance(inner, dict):
            name = inner.get("name", name)
        where = f"{place}, at {path[1:]}" if path else place
        module = item.get("module")
        called = str(name or kind)
        if kind in _CODE:
            if kind == "function" and _is_own(module):
                continue
            detail = f"module '{module}'" if kind == "function" else ""
            yield Power(op_table.CODE, called, kind, where, LOADED, ("Keras",), detail)
        elif module is not None and not _is_own(module):
            detail = f"module '{module}', which Keras would import"
            yield Power(op_table.CODE, called, kind, where, LOADED, ("Keras",), detail)
        elif module is None and item.get("registered_name") not in (None, kind):
            detail = f"a class of its own, '{item['registered_name']}'"
            found = (called, kind, where, LOADED, ("Keras",), detail)
            yield Power(op_table.UNKNOWN, *found)


def _is_own(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _OWN


def _in_entries(file: Path) -> Iterator[Power]:
    """Yield what is odd about the entries of an archive, such as where they lead."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    names = [info.filename for info in infos]
    for info in infos:
        path = PurePosixPath(info.filename)
        problem = ""
        if path.is_absolute() or ".." in path.parts:
            problem = "which lies outside of the archive"
        elif stat.S_ISLNK(info.external_attr >> 16):
            problem = "which is a link"
        elif names.count(info.filename) > 1:
            problem = "which is there more than once: readers differ in which counts"
        if problem:
            detail = f"'{info.filename}', {problem}"
            yield Power(
                op_table.WRITE, info.filename, "entry", file.name, LOADED, (), detail
            )


def _in_links(file: Path) -> Iterator[Power]:
    """Yield the links and datasets of an HDF5 file that read other files."""
    for name, kind, source in read_hdf5(file).outside:
        yield Power(op_table.READ, name, kind, file.name, LOADED, (), f"'{source}'")


def powers_of_tflite(file: Path) -> tuple[list[Power], int]:
    """Return the powers of a TFLite file, and how many ops it has.

    TFLite's own kernels compute. Flex ops are TensorFlow's, and have their powers.

    Raises:
        ModelError: it is no whole TFLite file.
    """
    content = read_tflite(file)
    known = op_table.table()
    entries = []
    count = 0
    for number, graph in enumerate(content.graphs):
        place = f"subgraph {number}" if number else MAIN
        for index, op in enumerate(graph.ops):
            count += 1
            if not op.is_custom:
                continue
            kind = op_table.UNKNOWN
            if op.type.startswith("Flex"):
                entry = known.get(op.type.removeprefix("Flex"))
                kind = op_table.UNKNOWN if entry is None else entry.power
            if kind not in op_table.HARMLESS:
                by = ("whoever runs it",)
                entries.append(Power(kind, str(index), op.type, place, RUN, by))
    return entries, count
