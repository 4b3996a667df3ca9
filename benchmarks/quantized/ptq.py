"""TFLite's converter: in float, and its post-training quantization.

`python -m benchmarks.quantized.ptq SAVED_MODEL CALIBRATION.npz FOLDER`: writes a file
for each scheme into the folder, in a process that the converter may end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.quantized.made import write_all

Array = np.ndarray[Any, Any]


def _data(images: Array) -> Callable[[], Iterator[list[Array]]]:
    return lambda: ([image[None]] for image in images)


def _int8(converter: Any, images: Array) -> None:
    converter.representative_dataset = _data(images)
    converter.inference_input_type = converter.inference_output_type = tf.int8


def _int16(converter: Any, images: Array) -> None:
    kernels = "EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8"
    converter.representative_dataset = _data(images)
    # Ops without such a kernel stay in float.
    converter.target_spec.supported_ops = [
        getattr(tf.lite.OpsSet, kernels),
        tf.lite.OpsSet.TFLITE_BUILTINS,
    ]
    converter.inference_input_type = converter.inference_output_type = tf.int16


def _float(converter: Any, images: Array) -> None:
    converter.optimizations = []


def _float16(converter: Any, images: Array) -> None:
    converter.target_spec.supported_types = [tf.float16]


SCHEMES: dict[str, Callable[[Any, Array], None]] = {
    "float": _float,
    "int8": _int8,
    "16x8": _int16,
    "dynamic int8": lambda converter, images: None,
    "float16": _float16,
}


def converted(path: str, images: Array, choose: Callable[[Any, Array], None]) -> bytes:
    """Return the file that the converter makes of a SavedModel by a scheme."""
    converter = tf.lite.TFLiteConverter.from_saved_model(path)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    choose(converter, images)
    blob: bytes = converter.convert()
    return blob


def main() -> None:
    """Write all files."""
    path, calibration, folder = sys.argv[1:]
    with np.load(calibration) as kept:
        (images,) = kept.values()
    schemes = {
        name: partial(converted, path, images, choose)
        for name, choose in SCHEMES.items()
    }
    write_all(schemes, Path(folder))


if __name__ == "__main__":
    main()
