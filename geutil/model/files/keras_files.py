"""Inspections of the files of Keras: their configuration alone, without Keras.

HDF5 files are read in a process of their own, since a damaged one can hang or end it: a
fork where that is safe, else `python -m geutil.model.files.keras_files PATH`, which
prints JSON, of the file, or of the entries of an archive whose names it reads as JSON.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from geutil.child_processes import ForkedCall, watch
from geutil.errors import ModelError
from geutil.graph.walks import tree
from geutil.model.files.inspection import (
    Inspection,
    LayerInfo,
    SignatureInfo,
    TensorInfo,
)

_SECONDS = 10
"""Seconds for a process to read a file's metadata; a damaged one can make it hang."""
_NAME_LENGTH = 26
"""Where the header of an entry says how long its name is."""
_HDF5_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError, BadZipFile)


class Hdf5File(NamedTuple):
    """The facts read from an HDF5 file.

    Attributes:
        config: the configuration of the model, as JSON; None if there is none.
        training: that of its training, as JSON; None if there is none.
        version: the version of Keras that wrote it.
        outside: its links to other files and the datasets whose data lie in others: the
            name, "external link", "external data" or "virtual data", and the file.
    """

    config: str | None
    training: str | None
    version: str
    bytes_weights: int
    outside: list[tuple[str, str, str]]


def read_hdf5(file: Path, entries: tuple[str, ...] = ()) -> Hdf5File:
    """Read an HDF5 file in another process.

    Args:
        file: the file.
        entries: if the file is an archive, the entries that are read instead of it.
            Then there is no configuration, and names begin with that of the entry.

    Cost: linear in its groups and datasets, and 0.2 CPU seconds for the process, unless
        it is forked; the last one is remembered.
    """
    try:
        told = file.stat()
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    return _read_elsewhere(file, entries, told.st_mtime_ns, told.st_size)


@lru_cache(maxsize=1)
def _read_elsewhere(
    file: Path, entries: tuple[str, ...], changed: int, size: int
) -> Hdf5File:
    """Return the facts that a reader found, and refuse a file that it did not read."""
    del changed, size
    what = f"'{file}': what it holds as weights" if entries else f"'{file}'"
    try:
        code, told, errors = (_forked if _can_fork() else _started)(file, entries)
    except TimeoutError as error:
        raise ModelError(
            f"{what} is no whole HDF5 file: it is not read within {_SECONDS} s"
        ) from error
    if code:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its reader ended with {code}"
        raise ModelError(f"{what} is no whole HDF5 file: {reason}")
    return Hdf5File(*json.loads(told))


def _started(file: Path, entries: tuple[str, ...]) -> tuple[int, bytes, bytes]:
    """Start a reader; return its exit code, its output and its errors."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(file)],
            # Names may be longer than arguments can be.
            input=json.dumps(entries).encode(),
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    return done.returncode, done.stdout, done.stderr


def _can_fork() -> bool:
    """Return whether a copy of this process can read a file."""
    # TensorFlow and threads of Python may hold locks, which nobody frees in a copy.
    # numpy has threads of OpenBLAS, which frees its own.
    is_alone = "tensorflow" not in sys.modules and threading.active_count() == 1
    return sys.platform == "linux" and is_alone


def _forked(file: Path, entries: tuple[str, ...]) -> tuple[int, bytes, bytes]:
    """Fork a reader; return its exit code, its output and its errors."""
    # For the copy, which begins with all that is imported.
    import h5py  # noqa: F401

    with TemporaryFile() as errors:

        def read(writing: int) -> int:
            os.dup2(errors.fileno(), 2)
            words, code = _told(str(file), entries)
            with open(2 if code else writing, "w") as out:  # noqa: PTH123
                out.write(words)
            return code

        reader = ForkedCall(read)
        if watch(reader, _SECONDS, every=_SECONDS) == "timed out":
            raise TimeoutError
        errors.seek(0)
        return reader.code or 0, reader.output, errors.read()


def _told(file: str, entries: Sequence[str]) -> tuple[str, int]:
    """Return the facts in a file as JSON and 0, or the fault of the file and 1."""
    try:
        return json.dumps(_read_entries(file, entries) if entries else _read(file)), 0
    except _HDF5_FAULTS as error:
        return f"{error}", 1


def _read_entries(file: str, entries: Sequence[str]) -> Hdf5File:
    total = 0
    outside: list[tuple[str, str, str]] = []
    for entry in entries:
        with ExitStack() as stack:
            found = _read(_entry(file, entry, stack))
        total += found.bytes_weights
        outside += [
            (entry + name, kind, source) for name, kind, source in found.outside
        ]
    return Hdf5File(None, None, "", total, outside)


def _read(file: Any) -> Hdf5File:
    """Return the facts in an open file; a group with two names is read once."""
    import h5py

    with h5py.File(file) as opened:
        config = _as_text(opened.attrs.get("model_config"))
        training = _as_text(opened.attrs.get("training_config"))
        version = str(opened.attrs.get("keras_version", ""))
        sizes: list[int] = []
        outside: list[tuple[str, str, str]] = []
        groups: list[tuple[Any, str]] = [(opened, "")]
        seen = {opened.id}
        for group, path in groups:
            for name, item, link in _members(group, path):
                if isinstance(link, h5py.ExternalLink):
                    outside.append((name, "external link", str(link.filename)))
                elif isinstance(item, h5py.Dataset):
                    sizes.append(int(item.nbytes))
                    files = dict.fromkeys(str(part[0]) for part in item.external or ())
                    outside += ((name, "external data", other) for other in files)
                    outside += _virtual(item, name)
                # A group can contain itself by a hard link.
                elif isinstance(link, h5py.HardLink) and item.id not in seen:
                    seen.add(item.id)
                    groups += [(item, name)] if isinstance(item, h5py.Group) else []
    return Hdf5File(config, training, version, sum(sizes), outside)


class _Part(io.RawIOBase):
    """A part of a file, as HDF5 reads it: in leaps, which a zip archive is slow at."""

    def __init__(self, handle: BinaryIO, start: int, size: int) -> None:
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence, 0)
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._handle.seek(self._start + self._at)
        data = self._handle.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _entry(file: str, name: str, stack: ExitStack) -> Any:
    """Return an entry of an archive as a file that can be read anywhere."""
    archive = stack.enter_context(ZipFile(file))
    info = archive.getinfo(name)
    with archive.open(name) as opened:
        if info.compress_type != ZIP_STORED:
            copy = stack.enter_context(TemporaryFile())  # noqa: SIM115
            shutil.copyfileobj(opened, copy)
            return copy
    handle = stack.enter_context(Path(file).open("rb"))  # noqa: SIM115
    handle.seek(info.header_offset + _NAME_LENGTH)
    name_length, more = struct.unpack("<2H", handle.read(4))
    start = info.header_offset + _NAME_LENGTH + 4 + name_length + more
    return _Part(handle, start, info.file_size)


def _as_text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode()
    return None if value is None else str(value)


def _virtual(dataset: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the other files that a virtual dataset is made of."""
    if dataset.is_virtual:
        files = {str(source.file_name) for source in dataset.virtual_sources()}
        yield from ((name, "virtual data", file) for file in sorted(files - {"."}))


def _members(group: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the members of a group: names, items and links.

    Items in other files are not opened.
    """
    import h5py

    for key in group:
        link = group.get(key, getlink=True)
        inside = not isinstance(link, h5py.ExternalLink)
        yield f"{path}/{key}", group.get(key) if inside else None, link


KERAS = "Keras"
KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
_CONFIG, _METADATA = "config.json", "metadata.json"
_WEIGHTS = ".weights.h5"
_LONGEST = 64 << 20
"""Bytes of a configuration beyond which it is none: that of ResNet152 has 400,000."""
_CODE = ("Lambda", "__lambda__")
_KEEPS_MORE = frozenset(
    (
        *("Normalization", "Discretization", "TextVectorization", "FeatureSpace"),
        *("IndexLookup", "StringLookup", "IntegerLookup", *_CODE),
    )
)
"""Layers whose call depends on more that a file holds: tables, adapted numbers."""
_POLICY, _INITIALIZERS = "DTypePolicy", "keras.initializers"
"""Other policies say that a layer is quantized, which its weights tell more of."""
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
    """Describe a file of Keras: its Keras version, its layers, its size.

    Also its inputs and outputs. The shape of an output is known if the last layer is of
    a class whose arguments tell its output's shape.
    """
    config, version, weights = configuration(file)
    return Inspection(
        KERAS,
        file,
        version=version,
        signatures=_signatures(config),
        layers=tuple(_layers(config)),
        bytes_total=file.stat().st_size,
        bytes_variables=weights,
    )


def configuration(file: Path) -> tuple[Any, str, int]:
    """Read layers, Keras version and weight sizes from a `.keras` or `.h5` file."""
    return _in_archive(file) if file.suffix == ".keras" else _in_hdf5(file)


def configurations(file: Path) -> tuple[Any, Any]:
    """Return the configurations of a file's layers, and of training where it is apart.

    A `.keras` file has the latter within the former; None means it.
    """
    config, _, _ = configuration(file)
    training = None if file.suffix == ".keras" else read_hdf5(file).training
    return config, None if training is None else _parsed(training, file)


def without_values(file: Path) -> Any:
    """Return the configuration in a `.keras` file, with zeros as initial weights.

    None if the file holds more of its layers than the configuration and the values of
    weights, or if Keras 3 has not written it.
    """
    config, version, _ = configuration(file)
    if version.startswith("2.") or not isinstance(config, dict):
        return None
    shared: set[Any] = set()
    for item in tree([config], _inner):
        kind, inner = _item(item, "class_name"), _item(item, "config")
        if not isinstance(kind, str):
            continue
        if kind in _KEEPS_MORE or (kind.endswith("Policy") and kind != _POLICY):
            return None
        if _item(item, "build_config") is not None:
            # Two places of one layer, which Keras tells from two layers.
            number = _item(item, "shared_object_id")
            if number is not None and number in shared:
                return None
            shared.add(number)
        is_initializer = _item(item, "module") == _INITIALIZERS
        if is_initializer and isinstance(inner, dict) and "seed" in inner:
            # Random numbers take time, and no more depends on them.
            item.update(class_name="Zeros", config={})
    config["compile_config"] = None
    return config


def refuse_code(file: Path) -> None:
    """Refuse an HDF5 file whose layers hold code; not every Keras does that itself."""
    config, _, _ = _in_hdf5(file)
    for item in tree([config], _inner):
        if _item(item, "class_name") in _CODE:
            raise ModelError(
                f"'{file}' holds code of Python (a Lambda layer), which geutil does "
                "not run: load it with Keras if you trust it, and pass the model"
            )


def _inner(item: Any) -> Iterable[Any]:
    """Return the parts of a value of JSON."""
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()


def _in_archive(file: Path) -> tuple[Any, str, int]:
    """Return the configuration, the version, and the bytes of the weights."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if _CONFIG not in names:
                raise ModelError(f"it holds no {_CONFIG}, so it is no Keras model")
            config = json.loads(_text(archive, _CONFIG))
            metadata = json.loads(_text(archive, _METADATA) or "{}")
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


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return an entry of an archive, if there is one, and refuse a bomb."""
    if name not in archive.namelist():
        return b""
    with archive.open(name) as opened:
        data = opened.read(_LONGEST + 1)
    if len(data) > _LONGEST:
        raise ModelError(f"its {name} is longer than {_LONGEST >> 20} MiB")
    return data


def _in_hdf5(file: Path) -> tuple[Any, str, int]:
    """Return the configuration, the version, and the bytes of the weights."""
    found = read_hdf5(file)
    if found.config is None:
        raise ModelError(
            f"'{file}' holds weights and no model: make the model, load them with its "
            "load_weights, and pass the model"
        )
    return _parsed(found.config, file), found.version, found.bytes_weights


def _parsed(text: str, file: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is no whole HDF5 file: {error}") from error


def _layers(config: Any) -> list[LayerInfo]:
    """Return the layers of a model, those of models within it in their place."""

    def inner(item: Any) -> Any:
        return _item(_item(item, "config"), "layers")

    def children(item: Any) -> list[Any]:
        layers = inner(item)
        return layers if isinstance(layers, list) else []

    layers = []
    for item in tree([config], children):
        if not isinstance(inner(item), list):
            name = _item(_item(item, "config"), "name") or _item(item, "name")
            layers.append(LayerInfo(str(name or ""), str(_item(item, "class_name"))))
    return layers


_SIGNATURE = "serving_default"
"""The name of a Keras model among signatures, as in `model.open`."""
_SAME_SHAPE = frozenset(
    (
        *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Dropout"),
        *("BatchNormalization", "LayerNormalization", "GroupNormalization"),
        *("SpatialDropout1D", "SpatialDropout2D", "GaussianNoise", "GaussianDropout"),
        *("UnitNormalization", "Rescaling", "Identity", "InputLayer"),
    )
)


def _signatures(config: Any) -> dict[str, SignatureInfo]:
    """Return the ends of a model; none if it is a class of its own."""
    inner = _item(config, "config")
    layers = _item(inner, "layers")
    if not isinstance(layers, list) or not layers:
        return {}
    by_name = {str(_item(_item(x, "config"), "name")): x for x in layers}
    inputs, outputs = (_item(inner, f"{role}_layers") for role in ("input", "output"))
    if inputs is None:
        # A Sequential: the first layer may be that of the input.
        shape = _shape(_item(inner, "build_input_shape"))
        first, *_, last = [*by_name] * 2
        known = _shape(_input_shape(by_name[first])) if shape is None else shape
        made = TensorInfo(None, known)
        for layer in by_name.values():
            made = _made(layer, made.shape)
        ends = SignatureInfo(
            {first: TensorInfo(_dtype(by_name[first]), known)}, {last: made}
        )
        return {_SIGNATURE: ends}
    return {
        _SIGNATURE: SignatureInfo(
            {
                key: TensorInfo(_dtype(layer), _shape(_input_shape(layer)))
                for key, layer in _named(inputs, by_name)
            },
            {key: _made(layer) for key, layer in _named(outputs, by_name)},
        )
    }


def _named(ends: Any, layers: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the ends that a configuration lists as keys and layers, in order of keys.

    It writes [layer, node, tensor], a list of these, or a dictionary.
    """
    if isinstance(ends, list) and ends and isinstance(ends[0], str):
        ends = [ends]
    if isinstance(ends, list):
        ends = {str(end[0]): end for end in ends if isinstance(end, list) and end}
    if isinstance(ends, dict):
        for key, end in sorted(ends.items()):
            name = str(end[0]) if isinstance(end, list) and end else ""
            yield str(key), layers.get(name)


def _made(layer: Any, before: tuple[int | None, ...] | None = None) -> TensorInfo:
    """Return the output of a layer, as far as its configuration tells.

    Where that does not tell the input's shape, it is `before`.
    """
    config, kind = _item(layer, "config"), str(_item(layer, "class_name"))
    shape = _shape(_input_shape(layer)) or before
    units = _item(config, "units")
    made = None
    if shape is not None and kind in _SAME_SHAPE:
        made = shape
    elif shape and kind == "Dense" and isinstance(units, int):
        made = (*shape[:-1], units)
    elif shape and kind in ("GlobalAveragePooling2D", "GlobalMaxPooling2D"):
        last = _item(config, "data_format") != "channels_first"
        if _item(config, "keepdims") is False:
            made = (shape[0], shape[-1 if last else 1])
    elif shape and kind == "Reshape" and _shape(_item(config, "target_shape")):
        sizes = _shape(_item(config, "target_shape")) or ()
        made = (shape[0], *sizes) if all(s and s > 0 for s in sizes) else None
    elif shape and kind == "Flatten":
        rest = [size for size in shape[1:] if size is not None]
        made = (shape[0], prod(rest) if len(rest) == len(shape) - 1 else None)
    return TensorInfo(_dtype(layer), made)


def _input_shape(layer: Any) -> Any:
    """Return the shape of a layer's input, as its configuration writes it."""
    config = _item(layer, "config")
    for key in ("batch_shape", "batch_input_shape"):
        if _item(config, key) is not None:
            return _item(config, key)
    built = _item(_item(layer, "build_config"), "input_shape")
    if built is not None:
        return built
    # A layer without weights is not built: its call tells what it reads.
    nodes = _item(layer, "inbound_nodes")
    if isinstance(nodes, list) and nodes:
        arguments = _item(nodes[0], "args")
        if isinstance(arguments, list) and arguments:
            return _item(_item(arguments[0], "config"), "shape")
    return None


def _shape(value: Any) -> tuple[int | None, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(size is None or isinstance(size, int) for size in value):
        return None
    return tuple(value)


def _dtype(layer: Any) -> str | None:
    """Return the type that a layer computes in, from its policy."""
    policy = _item(_item(layer, "config"), "dtype")
    if isinstance(policy, dict):
        policy = _item(_item(policy, "config"), "name")
    return str(policy).removeprefix("mixed_") if policy else None


def _item(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


if __name__ == "__main__":
    text, fault = _told(sys.argv[1], json.load(sys.stdin))
    sys.exit(text if fault else sys.stdout.write(text) and 0)
