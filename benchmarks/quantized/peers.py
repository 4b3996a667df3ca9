"""The files that peers make of a network, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.quantized.made import Made, read_all
from benchmarks.quantized.networks import Subject

ROOT = Path(__file__).parents[2]
TFLITE, LITERT = "TFLite", "LiteRT quantizer"
FLOAT = "float"
_SECONDS = 1800


def made_by_peers(subject: Subject, python: Path) -> dict[tuple[str, str], Made]:
    """Return the files of peers by scheme and peer, the one in float first.

    Args:
        subject: the network.
        python: that of the LiteRT quantizer; it is left out where there is none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved, data, plain = (folder / n for n in ("saved", "data.npz", "float.tflite"))
        save(subject.network, saved)
        np.savez(data, images=subject.calibration)
        made = _made(TFLITE, sys.executable, "ptq", saved, data)
        floats = made.get((FLOAT, TFLITE), Made())
        if python.exists() and floats.blob:
            plain.write_bytes(floats.blob)
            made |= _made(LITERT, str(python), "litert", plain, data)
        return made


def save(network: Any, path: Path) -> None:
    """Write a SavedModel of a network at inference.

    Keras' `export` may leave norms in training.
    """
    (shape,) = (tensor.shape for tensor in network.inputs)
    module = tf.Module()
    # So that they are saved: a module does not see those of layers.
    module.kept = [variable.value for variable in network.variables]
    call = tf.function(
        lambda image: {"result": network(image, training=False)},
        input_signature=[tf.TensorSpec(shape, tf.float32, "image")],
    )
    tf.saved_model.save(module, path, signatures=call)


def _made(
    peer: str, python: str, module: str, source: Path, data: Path
) -> dict[tuple[str, str], Made]:
    folder = data.with_name(module)
    folder.mkdir()
    done = subprocess.run(
        [
            *(python, "-m", f"benchmarks.quantized.{module}"),
            *(str(source), str(data), str(folder)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    made = {(scheme, peer): each for scheme, each in read_all(folder).items()}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        made["the rest", peer] = Made(error=f"exit {done.returncode}: {last}")
    return made
