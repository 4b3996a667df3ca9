"""Stages of networks next to an even split by op count; pipelines of a decoder.

`python -m benchmarks.pipelines [--quick] [--memory | --processes]`. Without either,
nothing is measured: the largest stage is by the cost model, and step times are
simulated, with the assumptions printed beside. `--memory` balances predicted peaks, and
`--processes` measures a pipeline of two processes next to its simulation.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import accumulate, pairwise

import tensorflow as tf

from benchmarks import pipeline_processes
from benchmarks.networks import ALL_NETWORKS, MakeStep
from geutil.memory import Pipeline, Stage, simulate
from geutil.memory.costs import op_time
from geutil.pipeline.partitions import even_split
from geutil.transform import Partition, partition

NETWORKS = ("ResNet152", "decoder", "U-Net")
SMALL: dict[str, MakeStep] = {
    "decoder": partial(ALL_NETWORKS["decoder"], depth=4, width=32, vocabulary=100),
    "U-Net": partial(ALL_NETWORKS["U-Net"], batch=1, pixels=32, width=4),
}
STAGES = (2, 4, 8)
DEVICES = (8, 64, 512)
MULTIPLY_ADDS = 50e12
"""Of a device in a second, as assumed."""
BANDWIDTH, LATENCY = 25e9, 10e-6
MICRO_BATCHES = 32
PARTS = 8
"""Micro-batches of a step whose peaks are compared."""


def loss_of(make: MakeStep) -> tf.Tensor:
    """Return the loss of a step, traced in a graph of its own."""
    step = make()
    graph = tf.__internal__.FuncGraph("forward")
    with graph.as_default():
        batch = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in step.specs]
        return step.loss(*batch)


def even_largest(found: Partition) -> float:
    """Return the time of the largest stage if each had as many ops."""
    ops = [op for stage in found.stages for op in stage.ops]
    sums = [0.0, *accumulate(map(op_time, ops))]
    count = len(found.stages)
    ends = [len(ops) * i // count for i in range(count + 1)]
    return max(sums[j] - sums[i] for i, j in pairwise(ends))


def compare(name: str, make: MakeStep) -> None:
    """Print a line for each number of stages."""
    loss = loss_of(make)
    for count in STAGES:
        devices = [f"/device:CPU:{i}" for i in range(count)]
        found = partition(loss, devices, "time")
        sent = sum(stage.sent_bytes for stage in found.stages)
        ratio = found.largest / even_largest(found)
        print(
            f"| {name} | {count} | {ratio:.2f} | {found.gap:.1%} | {sent / 1e6:.2f} |",
            flush=True,
        )


def compare_peaks(name: str, make: MakeStep) -> None:
    """Print a line for each number of stages: peaks of the largest."""
    loss = loss_of(make)
    for count in STAGES:
        devices = [f"/device:CPU:{i}" for i in range(count)]
        found = partition(loss, devices, "memory", micro_batches=PARTS)
        even = even_split(loss, devices, PARTS)
        print(
            f"| {name} | {count} | {found.largest / 1e6:.1f} | "
            f"{even.largest / 1e6:.1f} | {1 - found.largest / even.largest:.0%} | "
            f"{found.bound / 1e6:.1f} | {found.gap:.0%} |",
            flush=True,
        )


def pipelines(make: MakeStep) -> None:
    """Print what steps of the decoder take on many devices."""
    loss = loss_of(make)
    devices = [f"stage {i}" for i in range(8)]
    times = partition(loss, devices, "time")
    stages = [
        Stage(
            forward=stage.cost / MULTIPLY_ADDS,
            # Gradients take twice the forward pass, and that runs again.
            backward=3 * stage.cost / MULTIPLY_ADDS,
            sent=stage.sent_bytes,
            kept=before,
            held=4 * _weights(stage.ops),
            gradients=_weights(stage.ops),
        )
        for stage, before in zip(
            times.stages, (0, *(s.sent_bytes for s in times.stages)), strict=False
        )
    ]
    print(
        f"{MULTIPLY_ADDS:.0e} multiply-adds a second, {BANDWIDTH:.0e} bytes a second, "
        f"{LATENCY:.0e} s a message, {MICRO_BATCHES} micro-batches, 1F1B, forward "
        "passes run again, four times the weights held (gradients, two of Adam); "
        "peaks are without what runs again inside a stage"
    )
    print("| devices | peak MB | link MB | exchanged MB | bubble | step ms |")
    print("|---|---|---|---|---|---|")
    for count in DEVICES:
        run = simulate(
            Pipeline(
                stages,
                MICRO_BATCHES,
                bandwidth=BANDWIDTH,
                latency=LATENCY,
                replicas=count // len(stages),
            )
        )
        print(
            f"| {count} | {run.peak / 1e6:.1f} | {max(run.traffic) / 1e6:.1f} | "
            f"{max(run.exchanged) / 1e6:.1f} | {run.bubble:.1%} | "
            f"{1000 * run.seconds:.2f} |"
        )


def _weights(ops: tuple[tf.Operation, ...]) -> int:
    """Return the bytes of the variables that some ops read."""
    sizes = {
        op.inputs[0].name: op.outputs[0].shape.num_elements() * 4
        for op in ops
        if op.type == "ReadVariableOp"
    }
    return sum(sizes.values())


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser("python -m benchmarks.pipelines")
    parser.add_argument("--quick", action="store_true", help="small networks")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--memory", action="store_true", help="balance peaks")
    which.add_argument("--processes", action="store_true", help="measure two processes")
    options = parser.parse_args()
    if options.processes:
        pipeline_processes.main(quick=options.quick)
        return
    networks = SMALL if options.quick else {n: ALL_NETWORKS[n] for n in NETWORKS}
    if options.memory:
        print(f"{PARTS} micro-batches, 1F1B, stages compute again; predicted peaks")
        print("| network | stages | MB | even split MB | less | bound MB | above it |")
        print("|---|---|---|---|---|---|---|")
        for name, make in networks.items():
            compare_peaks(name, make)
        return
    print("| network | stages | largest, of an even split's | above bound | MB sent |")
    print("|---|---|---|---|---|")
    for name, make in networks.items():
        compare(name, make)
    pipelines(networks["decoder"])


if __name__ == "__main__":
    main()
