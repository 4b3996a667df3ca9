"""The chunks that an allocator hands out in a training step, beside the report.

`python -m benchmarks.chunks` prints a table: for each network and way of taking
gradients the buffers and chunks that geutil predicts, and the peak of TensorFlow's
allocator above rest. It runs on the first GPU; where there is none, on the CPU with the
same allocator (`TF_CPU_ALLOCATOR_USE_BFC`), whose memory grows. Each row is a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

NETWORKS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "U-Net", "encoder", "chain")
WAYS = ("plain", "speed", "memory", "50%", "25%")
_STEPS = 6
_RATE = 1e-4
_MEGA = 1e6
_LIMIT_SECONDS = 300
_ONE_ROW = "--row"


@dataclass(frozen=True)
class Row:
    """A step, in bytes and seconds.

    Attributes:
        device: where it ran.
        buffers: the peak of its buffers, as reported.
        chunks: that of the allocator's chunks, as reported.
        first: the peak of the first call.
        measured: that of later calls, the highest.
        seconds: the median of later calls.
    """

    device: str
    buffers: int
    chunks: int
    first: int
    measured: int
    seconds: float


def measured_row(network: str, way: str, sizes: dict[str, Any]) -> Row:
    """Measure a step in this process.

    Args:
        network: a name in `benchmarks.networks.NETWORKS`.
        way: one of `WAYS`.
        sizes: arguments of the network.
    """
    import tensorflow as tf

    from benchmarks.networks import NETWORKS as MADE
    from geutil.gradients import Budget, gradients
    from geutil.memory import predict

    gpus = tf.config.list_logical_devices("GPU")
    device = "GPU:0" if gpus else "CPU:0"
    step = MADE[network](**sizes)
    checkpoints = Budget(way) if way.endswith("%") else way

    @tf.function(autograph=False)
    def run(*batch: Any) -> Any:
        loss = step.loss(*batch)
        if way == "plain":
            slopes = tf.gradients(loss, step.variables)
        else:
            slopes = gradients(loss, step.variables, checkpoints=checkpoints)
        for variable, slope in zip(step.variables, slopes, strict=True):
            variable.assign_sub(_RATE * tf.convert_to_tensor(slope))
        return loss

    function = run.get_concrete_function(*step.specs)
    graph = function.graph
    predicted = predict([*graph.outputs, *graph.control_outputs])
    batch = step.tensors()
    peaks, seconds = [], []
    for _ in range(_STEPS):
        gc.collect()
        tf.config.experimental.reset_memory_stats(device)
        rest = tf.config.experimental.get_memory_info(device)["current"]
        start = time.perf_counter()
        # Its value is there when the step has ended.
        float(function(*batch))
        seconds.append(time.perf_counter() - start)
        peaks.append(tf.config.experimental.get_memory_info(device)["peak"] - rest)
    return Row(
        device,
        predicted.peak,
        predicted.resident or predicted.peak,
        peaks[0],
        max(peaks[1:]),
        statistics.median(seconds[1:]),
    )


def row_in_a_child(network: str, way: str, sizes: dict[str, Any]) -> Row:
    """Measure a step in a process of its own.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    what = json.dumps([network, way, sizes])
    command = [sys.executable, "-m", "benchmarks.chunks", _ONE_ROW, what]
    environment = {
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            env=environment,
            timeout=_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it took more than {_LIMIT_SECONDS} s") from error
    if child.returncode:
        raise RuntimeError(child.stderr.strip().splitlines()[-1])
    return Row(**json.loads(child.stdout.splitlines()[-1]))


def _cells(row: Row) -> list[str]:
    amounts = row.buffers, row.chunks, row.measured, row.first
    return [
        *(f"{amount / _MEGA:,.0f}" for amount in amounts),
        f"{row.measured / row.chunks:.2f}",
        f"{1000 * row.seconds:,.1f}",
        row.device,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument(
        "--batch", type=int, help="another batch than the network's own"
    )
    parser.add_argument(_ONE_ROW, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row is not None:
        network, way, sizes = json.loads(asked.row)
        sys.stdout.write(json.dumps(asdict(measured_row(network, way, sizes))) + "\n")
        return
    sizes = {} if asked.batch is None else {"batch": asked.batch}
    titles = "step|buffers MB|chunks MB|measured MB|first call|measured / chunks|ms|on"
    print(f"| {' | '.join(titles.split('|'))} |")
    print("|---" * len(titles.split("|")) + "|")
    for network in asked.network or NETWORKS:
        for way in asked.way or WAYS:
            given = {} if network == "chain" else sizes
            try:
                cells = _cells(row_in_a_child(network, way, given))
            except RuntimeError as error:
                cells = [str(error)]
            # One by one: a row that fails costs no other.
            print(f"| {network}, {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
