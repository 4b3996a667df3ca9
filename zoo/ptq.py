"""`python -m zoo.ptq FOLDER`: TFLite's own post-training quantization of a model.

A process of its own, since the converter ends the one it runs in where it meets what it
did not expect.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from zoo import tflite
from zoo.values import Values, keep, kept


def post_training(path: Path, data: list[Values]) -> bytes:
    """Return the file that TFLite's converter makes of a SavedModel and samples."""
    converter = tf.lite.TFLiteConverter.from_saved_model(str(path))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: iter(data)
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8
    blob: bytes = converter.convert()
    return blob


def ptq(path: Path, data: list[Values]) -> dict[str, Any]:
    """Return what the file is like, or how converting it fails."""
    blob = post_training(path, data)
    ops = tflite.file_ops(blob)
    return {
        "bytes": len(blob),
        "ops": len(ops),
        "float_ops": [op.kind for op in ops if op.is_float],
        "outputs": _outputs(blob, data),
    }


def _outputs(blob: bytes, data: list[Values]) -> Any:
    try:
        return [tflite.run(blob, sample) for sample in data]
    except (ValueError, RuntimeError) as error:
        return _said(error)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def main() -> None:
    """Convert, and write what came of it."""
    folder = Path(sys.argv[1])
    data = kept(folder / "calibration.pickle")
    try:
        found: Any = ptq(folder / "saved_model", data)
    except Exception as error:  # Of whatever class: TensorFlow fails, not geutil.
        found = _said(error)
    keep(folder / "ptq.pickle", found)


if __name__ == "__main__":
    main()
