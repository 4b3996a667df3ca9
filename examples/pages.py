"""MobileNetV2 on its way to int8, in pages to look at.

Run it with `python -m examples.pages`. Batch norms are folded, FakeQuant ops inserted
and calibrated, and a TFLite file is written; each step has a page in build/demo/ that
shows the graph before and after, with the report beside it. The weights are random, so
what rounding changes grows from layer to layer and the results mean nothing:
`examples.int8` shows that int8 is near float.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from geutil import model, report
from geutil.batchnorm import check, fold_batch_norms
from geutil.quantize import calibrate, compare_int8, quantize, to_int8

PAGES = Path("build/demo")
PIXELS = 64
MOST_FOLDED = 1e-4
"""Largest difference that folding may make, relative to the range of the output."""


def keras_network(images: np.ndarray) -> tf.keras.Model:
    """Build MobileNetV2 with random weights, and with batch norms that fit images."""
    tf.keras.utils.set_random_seed(0)
    network = tf.keras.applications.MobileNetV2(
        weights=None, classes=10, input_shape=(PIXELS, PIXELS, 3)
    )
    for layer in network.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.momentum = 0.0
    network(images, training=True)
    return network


def main() -> int:
    """Write the pages; the exit code is 0 when every check holds."""
    images = np.random.default_rng(0).normal(size=(32, PIXELS, PIXELS, 3))
    network = keras_network(images.astype(np.float32))
    whole, folded, m = (model.open(network) for _ in range(3))
    (name,) = whole.inputs
    data = [{name: part.astype(np.float32)} for part in np.split(images, 4)]

    folds = fold_batch_norms(folded)
    print(headline(folds))
    difference = check(whole, folded, data).relative

    fold_batch_norms(m)
    inserted = quantize(m, is_training=False)
    print(headline(inserted))
    print(headline(calibrate(m, data)))
    blob = to_int8(m)
    comparison = compare_int8(m, blob, data)
    print(f"{len(blob):,} bytes; {headline(comparison)}")
    checks = {
        f"folded, its results differ by {difference:.1e} of their range": (
            difference <= MOST_FOLDED
        ),
        "every op with an int8 kernel is quantized": inserted.coverage == 1.0,
        "the file computes nothing in float": not comparison.float_ops,
    }
    for what, holds in checks.items():
        print(f"  [{'ok' if holds else 'FAILED'}] {what}")

    PAGES.mkdir(parents=True, exist_ok=True)
    file = PAGES / "mobilenetv2_int8.tflite"
    file.write_bytes(blob)
    fold_page = report.diff(
        whole, folded, title="MobileNetV2, batch norms folded", report=folds
    )
    int8_page = report.diff(
        folded, m, title="MobileNetV2, FakeQuant for int8", report=inserted
    )
    print(f"  {fold_page.save(PAGES / 'mobilenetv2_folded.html', overwrite=True)}")
    print(f"  {int8_page.save(PAGES / 'mobilenetv2_int8.html', overwrite=True)}")
    print(f"  {file}")
    return 0 if all(checks.values()) else 1


def headline(result: object) -> str:
    """Return the first line of a report; its page has the others."""
    return str(result).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
