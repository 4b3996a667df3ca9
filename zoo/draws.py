"""`python -m zoo.draws NAME ... [--draws N]`: int8 noise in several draws of a model.

How much noise one file has next to another depends on how some hundred roundings fall
together: of one model the ratio goes from a half to one and a half with its weights and
samples. The page has the first draw. Here each draw has other weights, where the model
takes the seed, and other samples; the geometric mean of the ratios tells which of both
ways of quantizing is the noisier.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize, to_int8
from zoo import tflite
from zoo.models import MODELS, Entry
from zoo.plain import built
from zoo.ptq import post_training
from zoo.subject import BATCHES, Sample, draw
from zoo.values import Values, noise_in_order, without_grappler

DRAWS = 4
_APART = 1000
"""Between the seeds of two draws: a draw takes a seed for each batch."""


def noise_ratio(entry: Entry, seed: int) -> float:
    """Return the noise of geutil's file over that of PTQ's, in one draw."""
    subject = built(entry, seed)
    data = [draw(subject, 1 + i + _APART * seed) for i in range(BATCHES)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved_model")
        subject.write(path)
        exact = _run(path, data)
        opened = model.open(path)
        fold_batch_norms(opened)
        quantize(opened, is_training=False)
        calibrate(opened, data)
        files = to_int8(opened), post_training(path, data)
    ours, theirs = (
        noise_in_order([tflite.run(blob, sample) for sample in data], exact)
        for blob in files
    )
    return ours / theirs if ours and theirs else float("nan")


def _run(path: Path, data: Sequence[Sample]) -> list[Values]:
    run = tf.saved_model.load(str(path)).signatures["serving_default"]
    tensors = [{k: tf.constant(v) for k, v in sample.items()} for sample in data]
    return [{k: t.numpy() for k, t in run(**x).items()} for x in tensors]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser("python -m zoo.draws")
    parser.add_argument("names", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    without_grappler()
    print("| model | noise of geutil's file over PTQ's, draw by draw | mean |")
    print("|---|---|---|")
    for name in options.names:
        drawn = [noise_ratio(MODELS[name], seed) for seed in range(options.draws)]
        mean = float(np.exp(np.mean(np.log(drawn))))
        each = ", ".join(f"{ratio:.2f}" for ratio in drawn)
        print(f"| {name} | {each} | {mean:.2f} |", flush=True)


if __name__ == "__main__":
    main()
