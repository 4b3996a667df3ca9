"""Training of quantized networks: accuracy of the files, and the time of a step.

`python -m benchmarks.quantized.training [--steps 300] [--json PATH]`. The MobileNetV2
of glyphs is trained on with FakeQuant ops, its norms folded for training, in the same
steps each time; then it is stripped and converted, and the file is judged. The times
are medians of steps that take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import glyphs
from benchmarks.glyphs import accuracy
from benchmarks.quantized.judging import Runner
from benchmarks.timing import Side, compare
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import Spec, calibrate, quantize, to_tflite

Array = np.ndarray[Any, Any]

STEPS, BATCH = 300, 64
RATE = 2e-4
DECAY = 0.99
"""Of moving averages: those of 0.999 take more steps than there are."""
JUDGED = 4_000
_TRAINED, _JUDGED = 4_000_000, 3_000_002
"""Seeds of images; no epoch of `benchmarks.glyphs.train` has them."""


@dataclass(frozen=True)
class Way:
    """How a network is trained.

    Attributes:
        statistics: of the norms that are folded; "" leaves all in float.
        weight_bits: bits of weights, of depthwise convolutions 8; None for no
            FakeQuant ops.
    """

    statistics: str = ""
    weight_bits: int | None = None

    @property
    def quantization(self) -> dict[str, Any]:
        """What `quantize` is told."""
        if self.weight_bits == 4:
            return {"scheme": "int8x4"}
        kept = Spec(weight_bits=8)
        return {"weight_bits": self.weight_bits, "overrides": {"depthwise": kept}}


WAYS = {
    "float": Way(),
    "8/8, exact": Way("exact", 8),
    "8/8, one pass": Way("one_pass", 8),
    "4/8, exact": Way("exact", 4),
    "4/8, one pass": Way("one_pass", 4),
    "2/8, one pass": Way("one_pass", 2),
}
"""By the bits of weights and of activations."""


@dataclass(frozen=True)
class TrainedRow:
    """A network that was trained in one way.

    Attributes:
        way: the way.
        before: the accuracy of the file that is calibrated, and not trained, in
            percent; of "float" that of a file in float16.
        after: the accuracy of the file after training.
        ratio: the time of a step over that of "float".
    """

    way: str
    before: float
    after: float
    ratio: float


class Trained:
    """A network in training.

    Args:
        way: how.
        calibration: images that ranges are found from before the training.
    """

    def __init__(self, way: Way, calibration: Array) -> None:
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(0)
        network = glyphs.mobilenet()
        for layer in network.layers:
            if isinstance(layer, tf.keras.layers.BatchNormalization):
                layer.momentum = DECAY
        spec = tf.TensorSpec([None, *network.input_shape[1:]], name="image")
        in_training = tf.function(
            lambda image: {"logits": network(image, training=True)},
            input_signature=[spec],
        )
        self.way = way
        self.model = model.open(in_training)
        if way.weight_bits is not None:
            fold_batch_norms(
                self.model, is_training=True, statistics=way.statistics, strict=True
            )
            quantize(self.model, ema_decay=DECAY, **way.quantization)
            data = [{"image": calibration}]
            calibrate(self.model, data, "min_max", progress=False)
        self._step = _step(self.model.to_function())

    def train(self, images: Array, labels: Array, rate: float) -> None:
        """Take a step."""
        self._step(images, labels, tf.constant(rate, tf.float32))

    def blob(self) -> bytes:
        """Return the file."""
        deployed = self.model.strip_training()
        if self.way.weight_bits is None:
            fold_batch_norms(deployed)
            return to_tflite(deployed, scheme="float16")
        return to_tflite(deployed, scheme="int8")


def _step(function: Any) -> Callable[..., Any]:
    variables = function.trainable_variables
    optimizer = tf.keras.optimizers.Adam(RATE)
    optimizer.build(variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(images: Any, labels: Any, rate: Any) -> Any:
        optimizer.learning_rate.assign(rate)
        with tf.GradientTape() as tape:
            loss = loss_of(labels, function(image=images)["logits"])
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def judged(blob: bytes, images: Array, labels: Array) -> float:
    """Return the accuracy of a file, image by image, in percent."""
    return accuracy(Runner(blob, delegates=True), images, labels)


def rows(steps: int) -> list[TrainedRow]:
    """Train in every way, and return the rows."""
    images, labels = glyphs.images(steps * BATCH, _TRAINED)
    tests = glyphs.images(JUDGED, _JUDGED)
    nets = {name: Trained(way, images[:BATCH]) for name, way in WAYS.items()}
    before = {name: judged(net.blob(), *tests) for name, net in nets.items()}
    for index in range(steps):
        part = slice(index * BATCH, (index + 1) * BATCH)
        rate = RATE * 0.5 * (1 + np.cos(np.pi * index / steps))
        for net in nets.values():
            net.train(images[part], labels[part], rate)
    after = {name: judged(net.blob(), *tests) for name, net in nets.items()}
    seconds = dict(
        zip(
            nets,
            compare([_side(n, images, labels) for n in nets.values()]),
            strict=True,
        )
    )
    return [
        TrainedRow(name, before[name], after[name], seconds[name] / seconds["float"])
        for name in nets
    ]


def _side(net: Trained, images: Array, labels: Array) -> Side:
    def run(prepared: None) -> None:
        net.train(images[:BATCH], labels[:BATCH], 0.0)

    return Side(run)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.quantized.training")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the rows, not rounded")
    options = parser.parse_args()
    logging.getLogger("geutil").setLevel(logging.ERROR)
    found = rows(options.steps)
    print("| weights/activations, norms | calibrated, % | trained, % | step / float |")
    print("|---|---|---|---|")
    for row in found:
        print(f"| {row.way} | {row.before:.2f} | {row.after:.2f} | {row.ratio:.2f} |")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
