"""Many small models by `batch`, against a loop in one process and one of commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import tensorflow as tf

from benchmarks.rows import Row
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_tflite

MODELS, QUICK = 40, 4
PIXELS, SAMPLES = 16, 64
PIPELINE = "fold,quantize,tflite"
# A command starts TensorFlow for each model, a batch once.
LIMITS = {1: 0.6, 2: 0.4}
# A process for each model costs something; two at once on two cores win it back.
LOOP_LIMITS = {1: 2.0, 2: 1.2}
_COMMAND = "from geutil.cli.main import main; main()"


def rows(quick: bool) -> Iterator[Row]:
    count = QUICK if quick else MODELS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models, data = _write(folder, count)
        # Each once: they take minutes, and start as many processes.
        loop = _seconds(lambda: _loop(models, data))
        commands = _seconds(lambda: _commands(models, data, folder / "commands"))
        for workers, limit in LIMITS.items():
            output = folder / f"by {workers}"
            ours = _seconds(lambda n=workers, out=output: _batch(models, data, out, n))
            graph = f"{count} models, {workers} at once"
            for work, baseline, most in (
                ("a loop of commands", commands, limit),
                ("a loop in one process", loop, LOOP_LIMITS[workers]),
            ):
                yield Row(
                    "batch",
                    f"batch, against {work}",
                    graph,
                    ours * 1e3,
                    baseline * 1e3,
                    most,
                    note=f"{PIPELINE}; {ours / count:.1f} s a model",
                )


def _write(folder: Path, count: int) -> tuple[list[Path], Path]:
    """Write networks of Keras with random weights, and data for them."""
    layers = tf.keras.layers
    paths = []
    (folder / "models").mkdir()
    for index in range(count):
        tf.keras.utils.set_random_seed(index)
        image = layers.Input([PIXELS, PIXELS, 3], name="image")
        x = image
        for filters in (8, 16, 16):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
        paths.append(folder / "models" / f"net{index:02}.keras")
        tf.keras.Model(image, x).save(paths[-1])
    data = folder / "data.npz"
    images = np.random.default_rng(0).normal(size=(SAMPLES, PIXELS, PIXELS, 3))
    np.savez(data, image=images.astype(np.float32))
    return paths, data


def _seconds(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _batch(models: list[Path], data: Path, output: Path, workers: int) -> None:
    report = model.batch(models, PIPELINE, output, data=data, workers=workers)
    assert not report.undone, report


def _loop(models: list[Path], data: Path) -> None:
    for path in models:
        opened = model.open(path)
        fold_batch_norms(opened)
        quantize(opened, is_training=False)
        calibrate(opened, data, progress=False)
        path.with_suffix(".tflite").write_bytes(to_tflite(opened))


def _commands(models: list[Path], data: Path, output: Path) -> None:
    output.mkdir()
    for path in models:
        target = output / f"{path.stem}.tflite"
        arguments = ["quantize", str(path), "-o", str(target), "--data", str(data)]
        subprocess.run(
            [sys.executable, "-c", _COMMAND, *arguments],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
