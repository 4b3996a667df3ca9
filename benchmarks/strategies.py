"""A training step of ResNet50 under MirroredStrategy, with checkpoints and without.

`python -m benchmarks.strategies [--quick]`. Two logical CPU devices. Both ways take
turns, each time in a process of its own; printed are the medians of the step times, the
highest of the peaks of resident memory above what a process had before its first step,
and how far the gradients are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.resident import forget_peak, resident_peak

WAYS = ("plain", "memory")
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.strategies")
    parser.add_argument("--quick", action="store_true", help="small images, one round")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pixels, batch, rounds = (32, 8, 1) if options.quick else (160, 16, 3)
    if options.child:
        print(json.dumps(measured(options.child, pixels, batch)))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(in_a_process(way, options.quick))
    seconds = {w: statistics.median(r["seconds"] for r in found[w]) for w in WAYS}
    peaks = {w: max(r["bytes"] for r in found[w]) for w in WAYS}
    norms = [found[way][0]["norm"] for way in WAYS]
    print(f"ResNet50, {pixels} px, batch {batch} on two devices, {rounds} round(s)")
    for way in WAYS:
        print(f"{way}: {seconds[way] * 1e3:.0f} ms, {peaks[way] / 1e6:.0f} MB")
    print(f"ratio: time {seconds['memory'] / seconds['plain']:.2f}")
    print(f"ratio: peak {peaks['memory'] / peaks['plain']:.2f}")
    print(f"gradients apart by {abs(norms[1] / norms[0] - 1):.1e} of their norm")


def in_a_process(way: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.strategies", "--child", way]
    command += ["--quick"] * quick
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(way: str, pixels: int, batch: int) -> dict[str, Any]:
    import keras

    from geutil.gradients import gradients

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        keras.utils.set_random_seed(1)
        shape = (pixels, pixels, 3)
        net = keras.applications.ResNet50(weights=None, input_shape=shape, classes=10)
    weights = [v.value for v in net.trainable_variables]

    def replica(x: Any) -> Any:
        loss = tf.reduce_sum(tf.math.log(net(x, training=True)[:, 0])) / batch
        if way == "memory":
            found = gradients(loss, weights, checkpoints="memory")
        else:
            found = tf.gradients(loss, weights)
        context = tf.distribute.get_replica_context()
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
        return tf.linalg.global_norm(found)

    step = tf.function(lambda x: strategy.run(replica, args=(x,)))
    images = np.random.default_rng(0).normal(size=(batch, *shape)).astype(np.float32)

    def part(context: Any) -> Any:
        return tf.constant(images[context.replica_id_in_sync_group :: 2])

    x = strategy.experimental_distribute_values_from_function(part)
    traced = step.get_concrete_function(x)
    before = forget_peak()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        norm = strategy.experimental_local_results(traced(x))[0].numpy()
        times.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(times[1:]),
        "bytes": resident_peak() - before,
        "norm": float(norm),
    }


if __name__ == "__main__":
    main()
