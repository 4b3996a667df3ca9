"""Opening and saving a model, against TensorFlow's own load and save."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from benchmarks.rows import Row
from benchmarks.timing import Side, compare
from geutil import model

LIMIT = 1.25
PIXELS = 224


def rows(quick: bool) -> Iterator[Row]:
    del quick  # It takes under a minute.
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        net = tf.keras.applications.ResNet50(
            weights=None, input_shape=(PIXELS, PIXELS, 3)
        )
        net.export(source, verbose=False)
        size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())

        def clean() -> None:
            shutil.rmtree(target, ignore_errors=True)

        ours, baseline = compare(
            [
                Side(lambda _: model.open(source).save(target), clean),
                Side(lambda _: _load_and_save(source, target), clean),
            ]
        )
    yield Row(
        "round_trip",
        "open and save a SavedModel",
        f"ResNet50, {size >> 20} MiB",
        ours * 1e3,
        baseline * 1e3,
        LIMIT,
        note="baseline: tf.saved_model.load and save",
    )


def _load_and_save(source: Path, target: Path) -> None:
    loaded = tf.saved_model.load(str(source))
    tf.saved_model.save(loaded, str(target), signatures=dict(loaded.signatures))
