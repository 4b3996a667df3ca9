"""A training step of ResNet50 in less memory: predicted, measured, and drawn.

Run it with `python -m examples.training`. Both steps are measured in processes of their
own, op by op; the page is in build/demo/.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from geutil import report
from geutil.gradients import gradients, last_report
from geutil.memory import Measurement, measure

PAGES = Path("build/demo")
BATCH, PIXELS = 8, 96
MOST = 0.6
"""The peak with checkpoints, as a part of the peak without."""
NEAR = 1.05
"""What is measured, as a part of what the report says."""


def step_of(
    network: tf.keras.Model, batch: int, pixels: int, **how: Any
) -> tf.types.experimental.GenericFunction:
    """Return a step of gradient descent, traced; `how` goes to `gradients`."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_mean(tf.square(network(x, training=True)))
        weights = network.trainable_variables
        slopes = gradients(loss, weights, **how)
        for weight, slope in zip(weights, slopes, strict=True):
            weight.assign_sub(0.01 * slope)
        return loss

    return step.get_concrete_function(tf.TensorSpec([batch, pixels, pixels, 3]))


def measured(step: tf.types.experimental.GenericFunction) -> Measurement:
    """Run a step on noise in a process of its own."""
    return measure(step, (tf.random.normal([BATCH, PIXELS, PIXELS, 3]),), steps=1)


def main() -> int:
    """Train in less memory; the exit code is 0 when the peak is as low as it says."""
    tf.keras.utils.set_random_seed(0)
    shape = (PIXELS, PIXELS, 3)
    network = tf.keras.applications.ResNet50(weights=None, input_shape=shape)
    plain = measured(step_of(network, BATCH, PIXELS, checkpoints=None, order=False))
    saving_step = step_of(network, BATCH, PIXELS, checkpoints="memory")
    said = last_report()
    saving = measured(saving_step)
    ratio = saving.timeline.peak / plain.timeline.peak

    PAGES.mkdir(parents=True, exist_ok=True)
    page = report.memory(
        plain,
        saving,
        title=f"ResNet50, a training step, {BATCH} x {PIXELS} px",
        report=said,
    ).save(PAGES / "resnet50_memory.html", overwrite=True)
    print(str(said).split("\n\n")[0], "\n")
    as_said = saving.timeline.peak / said.peak
    checks = {
        f"measured: {saving.timeline.peak / 1e6:.1f} MB instead of "
        f"{plain.timeline.peak / 1e6:.1f}, {ratio:.2f} of it": ratio <= MOST,
        f"measured: {as_said:.2f} of what the report says": as_said <= NEAR,
        f"no schedule holds more than {said.worst / 1e6:.1f} MB, plain "
        f"{said.plain_worst / 1e6:.1f}": said.worst <= MOST * said.plain_peak,
    }
    for text, holds in checks.items():
        print(f"  [{'ok' if holds else 'FAILED'}] {text}")
    print(f"  {page}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
