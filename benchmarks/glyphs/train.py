"""Train the networks: `python -m benchmarks.glyphs.train [--network NAME] [--resume]`.

Each epoch has images that no other one has, so nothing is learnt by heart. The first
ones are hardly distorted: with all distortions from the start nothing is learnt for
many epochs. Weights are written after each epoch, rounded to float16, and the accuracy
is that of the rounded ones at the end, on images of a seed of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.glyphs.drawing import images
from benchmarks.glyphs.networks import FOLDER, NETWORKS, accuracy, keep, load

EPOCHS = 22
EASY_EPOCHS = 6
"""Until images are distorted in full."""
IMAGES = 10_000
BATCH = 64
RATES = {"mobilenet": 3e-3, "vit": 1.5e-3}
GENTLE = 0.5
"""The share of the rate where training is resumed."""
WARM_UP = 150
TEST_IMAGES = 10_000
TEST_SEED = 1_000_000
"""No epoch has this seed."""


def train(name: str, folder: Path, epochs: int, seen: int = 0) -> dict[str, Any]:
    """Train a network, write its weights, and return what is told of it.

    Args:
        name: of the network.
        folder: for the weights.
        epochs: how many.
        seen: epochs before; the weights that are there are trained on, more gently.
    """
    tf.keras.utils.set_random_seed(seen)
    network = NETWORKS[name](False)
    if seen:
        load(network, name, folder)
    for layer in network.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            # 0.999 would take more steps than there are.
            layer.momentum = 0.99
    rate = RATES[name] * (GENTLE if seen else 1.0)
    step = _step(network, rate, epochs)
    began = time.monotonic()
    for epoch in range(seen, seen + epochs):
        x, y = images(IMAGES, epoch + 1, min(1.0, epoch / EASY_EPOCHS))
        losses = [
            step(x[start : start + BATCH], y[start : start + BATCH])
            for start in range(0, IMAGES - BATCH + 1, BATCH)
        ]
        keep(network, name, folder)
        loss = float(tf.reduce_mean(losses))
        seconds = time.monotonic() - began
        print(f"{name} epoch {epoch + 1}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
    load(network, name, folder)
    x, y = images(TEST_IMAGES, TEST_SEED)
    return {
        "accuracy": round(accuracy(_inference(network), x, y), 2),
        "parameters": network.count_params(),
        "images": (seen + epochs) * IMAGES,
    }


def _step(network: Any, rate: float, epochs: int) -> Any:
    """Return a training step: cross entropy, AdamW, a cosine after a warm-up."""
    steps = epochs * (IMAGES // BATCH)
    schedule = tf.keras.optimizers.schedules.CosineDecay(
        0.0, steps - WARM_UP, warmup_target=rate, warmup_steps=WARM_UP
    )
    variables = network.trainable_variables
    optimizer = tf.keras.optimizers.AdamW(schedule, weight_decay=0.01)
    optimizer.build(variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, network(x, training=True))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def _inference(network: Any) -> Any:
    return tf.function(lambda x: network(x, training=False))


def main() -> None:
    """Train, and note the accuracy."""
    parser = argparse.ArgumentParser("python -m benchmarks.glyphs.train")
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument(
        "--resume", action="store_true", help="train on with the weights that are there"
    )
    options = parser.parse_args()
    # One thread: sums come in one order, and others can work.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    path = options.out / "trained.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    for name in options.network or NETWORKS:
        seen = told[name]["images"] // IMAGES if options.resume else 0
        told[name] = train(name, options.out, options.epochs, seen)
        path.write_text(json.dumps(told, indent=1) + "\n")
        print(name, told[name], flush=True)


if __name__ == "__main__":
    main()
