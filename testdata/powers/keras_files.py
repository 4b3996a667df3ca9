"""Samples of files of Keras: layers and functions that run code or read other files."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tf_keras

from testdata.powers.common import FileSample

layers = keras.layers
_REFUSED = "Keras 3.15 refuses it; older ones did what it says"
_UNPACKED = "what it does is up to who unpacks the archive"
_MARKER = "GEUTIL_TEST_MARKER"
_NEEDS = "it needs a package that is not installed"


def _model(*between: Any, inner: int = 3, **compiled: Any) -> Any:
    model = keras.Sequential([keras.Input([4, inner]), *between, layers.Dense(2)])
    if compiled:
        model.compile("sgd", **compiled)
    return model


def _writes(marker: Path) -> Callable[..., Any]:
    """Return a function that writes the marker; files of Keras hold its bytecode.

    HDF5 files cannot hold defaults, so that the path stands in the environment.
    """
    os.environ[_MARKER] = str(marker)
    return lambda *x: (
        open(__import__("os").environ["GEUTIL_TEST_MARKER"], "w").close(),  # noqa: PTH123
        x[0],
    )[1]


def _load(path: Path, marker: Path) -> None:
    os.environ[_MARKER] = str(marker)
    model = keras.saving.load_model(path, safe_mode=False)
    x = np.zeros([1, 4, 3], np.float32)
    if model.compiled:
        model.evaluate(x, np.zeros([1, 4, 2], np.float32), verbose=0)
    else:
        model(x)


def _saved(make: Callable[[Path], Any], suffix: str = ".keras") -> FileSample:
    def write(folder: Path, marker: Path) -> Path:
        path = folder / f"a{suffix}"
        make(marker).save(path)
        return path

    return FileSample("run code", write, _load)


def _lambda(marker: Path) -> Any:
    return layers.Lambda(_writes(marker), output_shape=lambda shape: shape)


def _functional(marker: Path) -> Any:
    x = keras.Input([4, 3])
    return keras.Model(x, _lambda(marker)(x))


def entries_of(path: Path) -> dict[str, bytes]:
    """Return what an archive holds, by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _edited(
    change: Callable[[Any, Path], None], kind: str = "run code", why: str = _REFUSED
) -> FileSample:
    """Return a sample whose configuration was changed."""

    def write(folder: Path, marker: Path) -> Path:
        path = folder / "a.keras"
        _model(layers.Activation("relu")).save(path)
        entries = entries_of(path)
        config = json.loads(entries["config.json"])
        change(config, marker)
        entries["config.json"] = json.dumps(config).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return path

    return FileSample(kind, write, None, why)


def _called(module: str, name: str, config: str = "") -> FileSample:
    """Return a sample in which an activation is a function of some module."""

    def change(whole: Any, _: Path) -> None:
        whole["config"]["layers"][1]["config"]["activation"] = {
            "module": module,
            "class_name": name,
            "config": config,
            "registered_name": name,
        }

    return _edited(change)


def _class(module: str, name: str, why: str = _REFUSED) -> FileSample:
    def change(whole: Any, _: Path) -> None:
        whole["config"]["layers"][1].update(
            module=module, class_name=name, registered_name=name
        )

    return _edited(change, why=why)


def _custom(whole: Any, _: Path) -> None:
    whole["config"]["layers"][1].update(
        module=None, class_name="Mine", registered_name="mine>Mine"
    )


def _cell(whole: Any, _: Path) -> None:
    """Hide a lambda in the cell of one of two directions."""
    lambda_ = {"class_name": "__lambda__", "config": {"value": ["code"]}}
    cell = {"class_name": "GRUCell", "module": "keras.layers"}
    cells = {"class_name": "StackedRNNCells", "module": "keras.layers"}
    cells["config"] = {"cells": [cell | {"config": {"activation": lambda_}}]}
    layer = {"class_name": "RNN", "module": "keras.layers", "config": {"cell": cells}}
    whole["config"]["layers"][1].update(
        class_name="Bidirectional",
        module="keras.layers",
        registered_name=None,
        config={"name": "both", "layer": layer},
    )


def _build_config(whole: Any, _: Path) -> None:
    whole["config"]["layers"][1]["build_config"] = {
        "module": "subprocess",
        "class_name": "Popen",
        "config": {"args": ["true"]},
    }


def _with_saved_model(folder: Path, marker: Path) -> Path:
    from testdata.powers import save
    from testdata.powers.writing import WRITING

    save(WRITING["WriteFile"][1], folder / "inner", marker)
    layer = layers.TFSMLayer(str(folder / "inner"), call_endpoint="serving_default")
    x = keras.Input(batch_shape=[])
    path = folder / "a.keras"
    keras.Model(x, layer(x)).save(path)
    return path


def _run_scalar(path: Path, marker: Path) -> None:
    keras.saving.load_model(path, safe_mode=False)(np.float32(1.0))


def _vocabulary(layer: Any, words: list[Any], dtype: str) -> FileSample:
    """Return a sample whose layer reads its vocabulary from a file."""

    def write(folder: Path, marker: Path) -> Path:
        path = folder / "a.keras"
        x = keras.Input([1], dtype=dtype)
        keras.Model(x, layer(vocabulary=words)(x)).save(path)
        entries = entries_of(path)
        config = json.loads(entries["config.json"])
        config["config"]["layers"][1]["config"]["vocabulary"] = str(marker)
        entries["config.json"] = json.dumps(config).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in entries.items():
                if not name.startswith("assets"):
                    archive.writestr(name, data)
        return path

    def run(path: Path, marker: Path) -> None:
        keras.saving.load_model(path, safe_mode=False)

    def prepare(marker: Path) -> None:
        marker.write_text("".join(f"{word}\n" for word in words))

    return FileSample("read files", write, run, prepare=prepare)


def _weights(change: Callable[[Any, Path], None], suffix: str) -> FileSample:
    """Return a sample whose weights lie in another file."""

    def write(folder: Path, marker: Path) -> Path:
        path = folder / f"a{suffix}"
        _model().save(path)
        inner = path
        if suffix == ".keras":
            entries = entries_of(path)
            inner = folder / "model.weights.h5"
            inner.write_bytes(entries["model.weights.h5"])
        with h5py.File(inner, "a") as opened:
            change(opened, marker)
        if suffix == ".keras":
            entries["model.weights.h5"] = inner.read_bytes()
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in entries.items():
                    archive.writestr(name, data)
        return path

    return FileSample("read files", write, None, _REFUSED)


def _external_link(opened: Any, marker: Path) -> None:
    opened["linked"] = h5py.ExternalLink(str(marker), "/")


def _external_data(opened: Any, marker: Path) -> None:
    opened.create_dataset("data", (4,), np.uint8, external=[(str(marker), 0, 4)])


def _virtual_data(opened: Any, marker: Path) -> None:
    layout = h5py.VirtualLayout((4,), np.uint8)
    layout[:] = h5py.VirtualSource(str(marker), "x", (4,))
    opened.create_virtual_dataset("data", layout)


def _archive(change: Callable[[Path], None]) -> FileSample:
    """Return a sample with an odd entry in its archive."""

    def write(folder: Path, marker: Path) -> Path:
        path = folder / "a.keras"
        _model().save(path)
        change(path)
        return path

    return FileSample("write files", write, None, _UNPACKED)


def _entry(name: str, data: bytes = b"x", mode: int = 0) -> FileSample:
    def change(path: Path) -> None:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(info, data)

    return _archive(change)


def _two_headers(path: Path) -> None:
    """Name an entry in its own header otherwise than in the directory."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/one.txt", "x")
    path.write_bytes(path.read_bytes().replace(b"one.txt", b"two.txt", 1))


def _old(function: Callable[[], Any], suffix: str, kind: str) -> FileSample:
    """Return a sample of Keras 2, in which ops of TensorFlow are layers."""

    def write(folder: Path, marker: Path) -> Path:
        path = folder / f"a{suffix}"
        function().save(path)
        return path

    def run(path: Path, marker: Path) -> None:
        found = tf_keras.models.load_model(path)(np.array([f"{marker}*"]))
        if not len(found):
            raise FileNotFoundError(marker)

    return FileSample(kind, write, run)


def _op_layer() -> Any:
    import tensorflow as tf

    x = tf_keras.Input([], dtype="string")
    return tf_keras.Model(x, tf.io.matching_files(x))


def _raw_op_layer() -> Any:
    import tensorflow as tf

    x = tf_keras.Input([], dtype="string")
    return tf_keras.Model(x, tf.raw_ops.MatchingFiles(pattern=x))


def _metadata(folder: Path, marker: Path) -> Path:
    x = tf_keras.Input([3])
    model = tf_keras.Model(x, tf_keras.layers.Lambda(_writes(marker))(x))
    model.save(folder / "net", save_format="tf")
    return folder / "net"


def _load_old(path: Path, marker: Path) -> None:
    os.environ[_MARKER] = str(marker)
    tf_keras.models.load_model(path, safe_mode=False)(np.zeros([1, 3], np.float32))


def _trained(marker: Path) -> Any:
    return _model(loss=_writes(marker))


KERAS_FILES: dict[str, FileSample] = {
    "Lambda": _saved(lambda m: _model(_lambda(m))),
    "Lambda in a wrapper": _saved(lambda m: _model(layers.TimeDistributed(_lambda(m)))),
    "Lambda in a Sequential": _saved(
        lambda m: _model(keras.Sequential([_lambda(m), layers.Dense(3)]))
    ),
    "Lambda in a Functional": _saved(lambda m: _model(_functional(m))),
    "Lambda, two models deep": _saved(
        lambda m: _model(keras.Sequential([_functional(m), layers.Dense(3)]))
    ),
    "lambda as activation": _called("builtins", "__lambda__"),
    "lambda as activation in a cell": _edited(_cell),
    "lambda as loss": _saved(_trained),
    "lambda as metric": _saved(lambda m: _model(loss="mse", metrics=[_writes(m)])),
    "Lambda in HDF5": _saved(lambda m: _model(_lambda(m)), ".h5"),
    "nested Lambda in HDF5": _saved(
        lambda m: _model(keras.Sequential([_lambda(m), layers.Dense(3)])), ".h5"
    ),
    "Lambda beside a SavedModel": FileSample("run code", _metadata, _load_old),
    "function from elsewhere": _called("os", "function", "system"),
    "download by Keras": _called("keras.utils", "function", "get_file"),
    "safe mode switched off": _called(
        "keras.config", "function", "enable_unsafe_deserialization"
    ),
    "another model loaded": _called("keras.models", "function", "load_model"),
    "configuration from data": _called("builtins", "function", "deserialize"),
    "function of TensorFlow": _called("tensorflow.io", "function", "write_file"),
    "class from elsewhere": _class("subprocess", "Popen"),
    "class of TensorFlow": _class("tensorflow.io.gfile", "GFile"),
    "class of Keras that is no layer": _class("keras.utils", "OrderedEnqueuer"),
    "build_config": _edited(_build_config),
    "TorchModuleWrapper": _class("keras.layers", "TorchModuleWrapper", _NEEDS),
    "JaxLayer": _class("keras.layers", "JaxLayer", _NEEDS),
    "FlaxLayer": _class("keras.layers", "FlaxLayer", _NEEDS),
    "class of one's own": _edited(
        _custom, "unknown", "the class is on the machine of its maker"
    ),
    "TFSMLayer": FileSample("run code", _with_saved_model, _run_scalar),
    "vocabulary of StringLookup": _vocabulary(
        layers.StringLookup, ["a", "b"], "string"
    ),
    "vocabulary of IntegerLookup": _vocabulary(layers.IntegerLookup, [1, 2], "int64"),
    "vocabulary of TextVectorization": _vocabulary(
        layers.TextVectorization, ["a", "b"], "string"
    ),
    "external link in weights": _weights(_external_link, ".keras"),
    "external data in weights": _weights(_external_data, ".keras"),
    "virtual data in weights": _weights(_virtual_data, ".keras"),
    "external link in HDF5": _weights(_external_link, ".h5"),
    "external data in HDF5": _weights(_external_data, ".h5"),
    "virtual data in HDF5": _weights(_virtual_data, ".h5"),
    "op as a layer": _old(_op_layer, ".h5", "list folders"),
    "raw op as a layer": _old(_raw_op_layer, ".keras", "list folders"),
    "entry above the archive": _entry("../outside"),
    "absolute entry": _entry("/tmp/outside"),
    "link as an entry": _entry("assets/link", b"/etc", stat.S_IFLNK | 0o777),
    "entry that expands": _entry("assets/zeros", bytes((256 << 20) + 1)),
    "two headers": _archive(_two_headers),
}
"""What is hidden in files of Keras; further entries of archives are in tests."""
