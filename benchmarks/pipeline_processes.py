"""A pipeline over two processes, measured, next to its simulation.

Called by `python -m benchmarks.pipelines --processes`. Two servers of TensorFlow on
loopback, one thread each; stage times are those that a traced step shows, bandwidth and
latency those of messages between the two.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.gradients import PipelinedStep, pipelined
from geutil.memory import Pipeline, simulate
from geutil.memory.measurement.child import complete_trace
from geutil.transform import partition

v1 = tf.compat.v1
DEVICES = tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2))
SERVE = "--serve"
_PASS = re.compile(r"pipeline/stage_(\d+)/(forward|backward)_")
_RECEIVED = re.compile(r"\[([\d.]+)(M?)B\]")
"""Bytes in a trace; from 0.1 MB on they are rounded to that, in MB of 2^20 bytes."""


def serve(task: int, ports: list[str]) -> tf.distribute.Server:
    """Return a server of one thread that is one of the two processes."""
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    options = v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
    )
    return tf.distribute.Server(
        cluster, job_name="worker", task_index=task, config=options
    )


@contextmanager
def two_processes() -> Iterator[str]:
    """Start another process, and give the address of this one's server."""
    with socket.socket() as one, socket.socket() as two:
        for opened in (one, two):
            opened.bind(("127.0.0.1", 0))
        ports = [str(opened.getsockname()[1]) for opened in (one, two)]
    command = [sys.executable, "-m", "benchmarks.pipeline_processes", SERVE, *ports]
    other = subprocess.Popen(command)
    try:
        yield serve(0, ports).target
    finally:
        other.kill()
        other.wait()


def build(
    rows: int, width: int, layers: int, count: int, schedule: str
) -> tuple[tf.Tensor, PipelinedStep, list[Any]]:
    """Return the input, a pipelined step of dense layers, and its updates."""
    x = y = v1.placeholder(tf.float32, [rows, width])
    ws = []
    for i in range(layers):
        start = v1.initializers.glorot_uniform(seed=i)
        shape = [width, width]
        ws.append(v1.get_variable(f"w{i}", shape, None, start, use_resource=True))
        y = tf.tanh(y @ ws[-1])
    loss = tf.reduce_mean(tf.square(y))
    found = partition(loss, DEVICES, "time")
    step = pipelined(loss, ws, found, x, count, schedule=schedule)
    updates = []
    for w, gradient in zip(ws, step.gradients, strict=True):
        # A weight is changed where it is.
        with tf.device(gradient.device):
            updates.append(w.assign_sub(0.01 * gradient, read_value=False))
    return x, step, updates


def link(session: v1.Session, size: int) -> float:
    """Return the seconds that a message of so many bytes takes to the other."""
    with tf.device(DEVICES[0]):
        made = tf.random.uniform([size // 4])
    with tf.device(DEVICES[1]):
        read = tf.identity(made)[:1]
    with tf.device(DEVICES[0]):
        alone = tf.identity(made)[:1]
    return max(_seconds(session, read, {}) - _seconds(session, alone, {}), 1e-6)


def _seconds(session: v1.Session, fetches: Any, feeds: Any, times: int = 7) -> float:
    """Return the median time of a step."""
    session.run(fetches, feeds)
    found = []
    for _ in range(times):
        start = time.perf_counter()
        session.run(fetches, feeds)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def traced(
    session: v1.Session, step: PipelinedStep, updates: list[Any], feeds: Any
) -> tuple[list[list[float]], int]:
    """Return the seconds of each stage, forward and backward, and bytes received."""

    def run() -> Any:
        metadata = v1.RunMetadata()
        options = v1.RunOptions(
            trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        session.run(updates, feeds, options=options, run_metadata=metadata)
        return metadata

    metadata = complete_trace(run)
    taken = [[0.0, 0.0] for _ in step.partition.stages]
    received = 0
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            name = _PASS.match(node.node_name)
            if name:
                span = node.op_end_rel_micros - node.op_start_rel_micros
                taken[int(name[1])][name[2] == "backward"] += 1e-6 * span
            if node.node_name.startswith("RecvTensor"):
                size = _RECEIVED.search(node.timeline_label)
                unit = 1 << 20 if size and size[2] else 1
                received += round(float(size[1]) * unit) if size else 0
    count = step.schedule.micro_batches
    return [[t / count for t in stage] for stage in taken], received


def main(*, quick: bool) -> None:
    """Print a line for each schedule."""
    rows, width, layers = (64, 64, 4) if quick else (1024, 512, 8)
    print(
        "| schedule | micro-batches | measured ms | simulated ms | bytes received | "
        "predicted |"
    )
    print("|---|---|---|---|---|---|")
    with two_processes() as target:
        for schedule in ("gpipe", "1f1b"):
            for count in (1, 4) if quick else (1, 2, 4, 8):
                compare(target, (rows, width, layers, count, schedule))


def compare(target: str, arguments: tuple[int, int, int, int, str]) -> None:
    """Measure a step, simulate it, and print both."""
    rows, width, _, count, schedule = arguments
    with tf.Graph().as_default(), v1.Session(target) as session:
        x, step, updates = build(*arguments)
        session.run(v1.global_variables_initializer())
        feeds = {x: np.random.default_rng(0).normal(size=[rows, width])}
        measured = _seconds(session, updates, feeds)
        stages, received = traced(session, step, updates, feeds)
        part = 4 * rows * width // count
        small, large = link(session, 1024), link(session, max(part, 1 << 20))
        pipeline = Pipeline(
            [
                replace(own, forward=forward, backward=backward)
                for own, (forward, backward) in zip(
                    step.pipeline.stages, stages, strict=True
                )
            ],
            count,
            schedule,
            bandwidth=max(part, 1 << 20) / max(large - small, 1e-6),
            latency=small,
        )
        run = simulate(pipeline)
        sent = sum(step.traffic.values())
        print(
            f"| {schedule} | {count} | {1e3 * measured:.2f} | "
            f"{1e3 * run.seconds:.2f} | {received} | {sent} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        serve(1, sys.argv[2:]).join()
