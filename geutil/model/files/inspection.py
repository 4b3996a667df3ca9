"""Inspections: a model from its files alone, those of Keras among them."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.errors import ModelError
from geutil.notebook_display import Shown

if TYPE_CHECKING:
    import tensorflow as tf

_SHOWN = 10


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and shape.

    Attributes:
        dtype: its type; of a TFLite file its name, since no TensorFlow is needed to
            read that. None if the file names one that this TensorFlow lacks.
        shape: its size in each dimension, None where it is free; None as a whole if
            not even the rank is known.
    """

    dtype: tf.DType | str | None
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        name = str(getattr(self.dtype, "name", self.dtype or "unknown"))
        if self.shape is None:
            return f"{name} of any shape"
        return f"{name} [{','.join('n' if s is None else str(s) for s in self.shape)}]"

    @property
    def elements(self) -> int:
        """The number of elements, 0 if a size is free."""
        count = 1
        for size in self.shape if self.shape is not None else (0,):
            count *= size or 0
        return count


@dataclass(frozen=True)
class SignatureInfo:
    """The inputs and outputs of a signature by name.

    Attributes:
        inputs: what it takes.
        outputs: what it gives.
    """

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class FunctionInfo:
    """A function of the library.

    Attributes:
        name: its name.
        ops: how many ops its body has.
        inputs: how many inputs it takes.
        outputs: how many outputs it gives.
    """

    name: str
    ops: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class VariableInfo:
    """A variable.

    Attributes:
        name: its name; in a model without an object graph, its key in the checkpoint.
        tensor: its type and shape.
        trainable: whether it is trained; None if the files do not say.
    """

    name: str
    tensor: TensorInfo
    trainable: bool | None


@dataclass(frozen=True)
class LayerInfo:
    """A layer of a Keras model.

    Attributes:
        name: its name.
        type: the name of its class.
    """

    name: str
    type: str


@dataclass(frozen=True)
class Inspection(Shown):
    """What a model's files say. What does not apply to its kind is empty.

    Attributes:
        kind: "SavedModel", "GraphDef", "Keras" or "TFLite".
        path: what was inspected.
        tags: the tags of the MetaGraph.
        version: the version of TensorFlow (of Keras, for a .keras file) that wrote it;
            "" if the file does not say.
        signatures: inputs and outputs by the name of the signature.
        ops: how many ops of each type the main graph has, the most frequent first.
        function_ops: the same for all functions together.
        functions: the functions of the library, in its order.
        variables: the variables.
        assets: the names of asset files.
        layers: the layers of a Keras model.
        bytes_total: the size of all files.
        bytes_variables: the size of the files of variables.
        bytes_constants: what the values of constants take in the file.
    """

    kind: str
    path: Path
    tags: tuple[str, ...] = ()
    version: str = ""
    signatures: Mapping[str, SignatureInfo] = field(default_factory=dict)
    ops: Mapping[str, int] = field(default_factory=dict)
    function_ops: Mapping[str, int] = field(default_factory=dict)
    functions: tuple[FunctionInfo, ...] = ()
    variables: tuple[VariableInfo, ...] = ()
    assets: tuple[str, ...] = ()
    layers: tuple[LayerInfo, ...] = ()
    bytes_total: int = 0
    bytes_variables: int = 0
    bytes_constants: int = 0

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def lines_of(info: Inspection) -> Iterable[str]:
    """Yield the lines that describe a file; lists that are empty are left out."""
    by = f", written by version {info.version}" if info.version else ""
    yield f"{info.kind} {info.path}{by}"
    if info.tags:
        yield f"tags: {', '.join(info.tags)}"
    total, variables, constants = map(
        size_text, (info.bytes_total, info.bytes_variables, info.bytes_constants)
    )
    yield f"size: {total}, of it variables {variables}, constants {constants}"
    for name, signature in info.signatures.items():
        yield from signature_lines(f"signature {name}", signature)
    yield from counted("ops", info.ops)
    yield from counted("ops in functions", info.function_ops)
    yield from listed(
        "functions",
        [f"{f.name}: {f.ops} ops, {f.inputs} -> {f.outputs}" for f in info.functions],
    )
    yield from listed(
        "variables",
        [
            f"{v.name}: {v.tensor}" + (" (frozen)" if v.trainable is False else "")
            for v in info.variables
        ],
    )
    yield from listed("layers", [f"{x.name}: {x.type}" for x in info.layers])
    if info.assets:
        yield f"assets: {', '.join(info.assets)}"


def signature_lines(heading: str, signature: SignatureInfo) -> Iterable[str]:
    """Yield a heading and a line for each input and output."""
    yield heading
    for role, tensors in (("in ", signature.inputs), ("out", signature.outputs)):
        for key, tensor in tensors.items():
            yield f"  {role} {key}: {tensor}"


def counted(what: str, counts: Mapping[str, int]) -> Iterable[str]:
    """Yield a line that says how many there are of each; none if there are none."""
    if counts:
        shown = ", ".join(f"{n} {op}" for op, n in list(counts.items())[:_SHOWN])
        more = f" and {len(counts) - _SHOWN} types more" if len(counts) > _SHOWN else ""
        yield f"{what}: {sum(counts.values())} ({shown}{more})"


def listed(what: str, items: list[str]) -> Iterable[str]:
    """Yield a heading and the first items of a list; nothing if it is empty."""
    if items:
        yield f"{what}: {len(items)}"
        yield from (f"  {item}" for item in items[:_SHOWN])
        if len(items) > _SHOWN:
            yield f"  and {len(items) - _SHOWN} more"


def size_text(count: int) -> str:
    """Return a number of bytes as people read it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


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
            config_text = opened.attrs.get("model_config")
            version = opened.attrs.get("keras_version", "")
            opened.visititems(count)
        config = None if config_text is None else json.loads(config_text)
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
    layers = []
    pending = [config]
    while pending:
        item = pending.pop()
        inner = _item(_item(item, "config"), "layers")
        if isinstance(inner, list):
            pending += reversed(inner)
        else:
            name = _item(_item(item, "config"), "name") or _item(item, "name")
            layers.append(LayerInfo(str(name or ""), str(_item(item, "class_name"))))
    return layers


def _item(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
