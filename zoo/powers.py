"""False alarms: what `geutil.model.powers` says of harmless networks, in their files.

`python -m zoo.powers` builds the networks of the zoo that need no further package,
other sizes of keras.applications, and layers that read tables and texts; saves each in
the forms that it has; and asks of each file whether it computes only. It prints a
table. What is done is noted in a folder, and a second run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from geutil.model import powers
from zoo.models import MODELS
from zoo.subject import Function, GraphOfVersion1

_APPLICATIONS = {
    # The least size that each takes, or close to it.
    **dict.fromkeys(("MobileNetV3Large", "EfficientNetB1", "EfficientNetB2"), 32),
    **dict.fromkeys(("EfficientNetV2B1", "EfficientNetV2B2", "VGG19"), 32),
    **dict.fromkeys(("DenseNet169", "ResNet101", "ResNet101V2", "ConvNeXtSmall"), 32),
}
_CONVERTED = 4 << 20
"""Bytes of a SavedModel beyond which it is not converted, which takes long."""
_WORDS = ["a", "film", "good", "bad", "the"]
layers = keras.layers


def _application(name: str, size: int) -> Any:
    return getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=5, include_top=True
    )


def _sequence(*stack: Any, shape: tuple[int, ...] = (8, 4), dtype: str = "float32"):
    network = keras.Sequential([keras.Input(shape, dtype=dtype), *stack])
    network.compile("adam", "mse", metrics=["mae"])
    return network


def _texts() -> Any:
    vector = layers.TextVectorization(output_sequence_length=6, vocabulary=_WORDS)
    embedded = layers.Embedding(8, 4)
    return _sequence(
        vector, embedded, layers.LSTM(4), layers.Dense(1), shape=(), dtype="string"
    )


def _looked_up() -> Any:
    lookup = layers.StringLookup(vocabulary=_WORDS)
    back = layers.StringLookup(vocabulary=_WORDS, invert=True)
    return _sequence(lookup, back, shape=(1,), dtype="string")


def _numbers() -> Any:
    lookup = layers.IntegerLookup(vocabulary=[3, 5, 7], output_mode="multi_hot")
    return _sequence(lookup, layers.Dense(2), shape=(3,), dtype="int64")


def _buckets() -> Any:
    buckets = layers.Discretization([0.0, 1.0])
    coded = layers.CategoryEncoding(3, output_mode="multi_hot")
    return _sequence(buckets, coded, layers.Dense(2), shape=(4,))


def _crossed() -> Any:
    hashed = layers.Hashing(10, output_mode="one_hot")
    return _sequence(hashed, layers.Dense(2), shape=(1,), dtype="string")


def _normalized() -> Any:
    return _sequence(layers.Normalization(mean=0.5, variance=2.0), layers.Dense(2))


def _both_ways() -> Any:
    inner = layers.GRU(4, return_sequences=True)
    return _sequence(layers.Bidirectional(inner), layers.LSTM(3), layers.Dense(2))


def _cells() -> Any:
    cells = layers.StackedRNNCells([layers.LSTMCell(4), layers.GRUCell(3)])
    return _sequence(layers.RNN(cells), layers.Dense(2))


def _augmented() -> Any:
    return _sequence(
        layers.RandomFlip(),
        layers.RandomRotation(0.1),
        layers.Rescaling(1 / 255),
        layers.Conv2D(4, 3, activation="swish", kernel_regularizer="l2"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, activation=keras.activations.softmax),
        shape=(16, 16, 3),
    )


def _attention() -> Any:
    x = keras.Input([6, 8])
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    network = keras.Model(x, keras.ops.mean(layers.Dense(8, "gelu")(y), axis=1))
    network.compile(keras.optimizers.AdamW(1e-3), keras.losses.Huber())
    return network


def _convolved_over_time() -> Any:
    inner = layers.ConvLSTM2D(3, 3, return_sequences=False)
    return _sequence(inner, layers.Flatten(), layers.Dense(2), shape=(3, 8, 8, 2))


_OWN: dict[str, Callable[[], Any]] = {
    "TextVectorization": _texts,
    "StringLookup": _looked_up,
    "IntegerLookup": _numbers,
    "Discretization": _buckets,
    "Hashing": _crossed,
    "Normalization": _normalized,
    "Bidirectional": _both_ways,
    "StackedCells": _cells,
    "Augmentation": _augmented,
    "Attention": _attention,
    "ConvLSTM": _convolved_over_time,
}


def builders() -> dict[str, Callable[[], Any]]:
    """Return what builds each network, by name: a subject of the zoo, or of Keras."""
    found = {name: e.build for name, e in MODELS.items() if not e.missing}
    for name, size in _APPLICATIONS.items():
        found[name] = lambda name=name, size=size: _application(name, size)
    return found | _OWN


def files_of(model: Any, folder: Path) -> Iterator[Path]:
    """Save a model in each form that it has, and yield the paths."""
    network = getattr(model, "network", None)
    whole = folder / "net"
    if isinstance(model, Function | GraphOfVersion1):
        model.write(whole)
    else:
        network = model
        model.export(whole, verbose=False)
    yield whole
    if isinstance(model, GraphOfVersion1) and model.frozen:
        (folder / "net.pb").write_bytes(model.freeze().SerializeToString())
        yield folder / "net.pb"
    if network is not None:
        for suffix in (".keras", ".h5"):
            network.save(folder / f"net{suffix}")
            yield folder / f"net{suffix}"
        if type(network).__module__.startswith("tf_keras"):
            network.save(folder / "old", save_format="tf")
            yield folder / "old"
    if sum(f.stat().st_size for f in whole.rglob("*") if f.is_file()) < _CONVERTED:
        yield from _converted(whole, folder / "net.tflite")


def _converted(saved_model: Path, file: Path) -> Iterator[Path]:
    converter = tf.lite.TFLiteConverter.from_saved_model(str(saved_model))
    ops = tf.lite.OpsSet
    converter.target_spec.supported_ops = [ops.TFLITE_BUILTINS, ops.SELECT_TF_OPS]
    try:
        file.write_bytes(converter.convert())
    except Exception as error:
        # Some of version 1 cannot be converted, which is not asked here.
        print(f"  no TFLite file: {str(error)[:60]!r}")
        return
    yield file


def asked(name: str, build: Callable[[], Any]) -> dict[str, Any]:
    """Build a model, and return the files that it has, and those that alarm."""
    begin = time.perf_counter()
    code: list[str] = []
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    files, alarms = [], {}
    with tempfile.TemporaryDirectory() as folder:
        model = build()
        network = getattr(model, "network", model)
        kinds = {type(layer).__name__ for layer in getattr(network, "layers", ())}
        for path in files_of(model, Path(folder)):
            told = powers(path)
            files.append(path.name)
            # A Lambda layer is code, in whatever holds its configuration.
            if "Lambda" in kinds and set(told.kinds) == {"run code"}:
                code.append(path.name)
            elif not told.computes_only:
                alarms[path.name] = [str(entry) for entry in told.dangers]
    seconds = round(time.perf_counter() - begin, 1)
    return {
        "name": name,
        "files": files,
        "code": code,
        "alarms": alarms,
        "seconds": seconds,
    }


def main() -> None:
    """Ask all models that are not noted yet, and print the table."""
    parser = argparse.ArgumentParser("python -m zoo.powers")
    parser.add_argument("--only", action="append", choices=list(builders()))
    default = Path(tempfile.gettempdir()) / "geutil-zoo-powers"
    parser.add_argument("--folder", type=Path, default=default, help="of the notes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, build in builders().items():
        if options.only and name not in options.only:
            continue
        note = options.folder / f"{name}.json"
        if not note.exists() or options.only:
            note.write_text(json.dumps(asked(name, build)))
        row = json.loads(note.read_text())
        rows.append(row)
        print(f"{name:20} {', '.join(row['files'])}  {row['seconds']} s", flush=True)
        for file, told in row["alarms"].items():
            print(f"  FALSE ALARM {file}: {'; '.join(told)}", flush=True)
    files = np.sum([len(row["files"]) for row in rows])
    alarms = np.sum([len(row["alarms"]) for row in rows])
    code = np.sum([len(row["code"]) for row in rows])
    print(f"{len(rows)} models, {files} files, {alarms} false alarms")
    print(f"{code} files hold Lambda layers, which is told, and true")


if __name__ == "__main__":
    main()
