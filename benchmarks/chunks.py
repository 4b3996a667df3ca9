"""The peaks of an allocator in training steps, beside geutil's reports.

`python -m benchmarks.chunks` prints a table: for each network, optimizer and way of
taking gradients the buffers, chunks and worst case that geutil tells, and the peak of
TensorFlow's allocator above rest. It runs on the first GPU. Where there is none it says
so, and with `--dry-run` runs small steps on the CPU, which can have the same allocator
(`TF_CPU_ALLOCATOR_USE_BFC`; its memory grows). Each row is a process.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "ResNet50": {"batch": 64},
    "MobileNetV2": {"batch": 64},
    "EfficientNetB0": {"batch": 64},
    "U-Net": {"batch": 32},
    "ConvNeXtTiny": {"batch": 64},
    "encoder": {"batch": 16, "width": 768, "heads": 12},
    "decoder": {"batch": 16, "length": 512},
    "LSTM": {},
    "chain": {"layers": 64, "rows": 8192, "width": 2048},
}
"""The networks of the table, as large as a GPU wants them."""
_SMALL: dict[str, dict[str, int]] = {
    "ResNet50": {"batch": 1, "pixels": 64},
    "MobileNetV2": {"batch": 1, "pixels": 64},
    "EfficientNetB0": {"batch": 1, "pixels": 64},
    "U-Net": {"batch": 1, "pixels": 64},
    "ConvNeXtTiny": {"batch": 1, "pixels": 64},
    "encoder": {"batch": 1, "length": 32, "width": 64, "depth": 2},
    "decoder": {"batch": 1, "length": 32, "width": 64, "depth": 2},
    "LSTM": {},
    "chain": {"layers": 12, "rows": 4096, "width": 256},
}
WAYS = ("plain", "speed", "memory", "50%", "25%", "memory, offload")
OPTIMIZERS = ("SGD", "Adam")
_STEPS = 8
_RATE = 1e-4
_MEGA = 1e6
_LIMIT_SECONDS = 300
_ONE_ROW = "--row"


@dataclass(frozen=True)
class Row:
    """A step, in bytes and seconds.

    Attributes:
        device: where it ran.
        buffers: the peak of its buffers, as predicted of the finished step.
        chunks: that of the allocator's chunks, likewise.
        reported: the chunks that the report on the gradients tells; with plain
            gradients those that are predicted.
        worst: the most that chunks take under any schedule, as geutil built the step
            and as Grappler makes it.
        away: the bytes that wait in the host's memory.
        first: the peak of the first call.
        measured: that of later calls, the highest.
        seconds: the median of later calls.
        plans: how many plans were made for a budget.
    """

    device: str
    buffers: int
    chunks: int
    reported: int
    worst: int
    away: int
    first: int
    measured: int
    seconds: float
    plans: int


def _updates(optimizer: str, variables: Any) -> Callable[[Any, Any], None]:
    """Return what applies a gradient to a variable, as an optimizer does."""
    import tensorflow as tf

    if optimizer == "SGD":
        return lambda variable, slope: variable.assign_sub(_RATE * slope)
    moments = {
        variable.ref(): [tf.Variable(tf.zeros_like(variable)) for _ in range(2)]
        for variable in variables
    }

    def apply(variable: Any, slope: Any) -> None:
        first, second = moments[variable.ref()]
        mean = first.assign_add(0.1 * (slope - first), read_value=False)
        square = second.assign_add(1e-3 * (slope * slope - second), read_value=False)
        with tf.control_dependencies([mean, square]):
            scale = tf.sqrt(second.read_value()) + 1e-7
            variable.assign_sub(_RATE * first.read_value() / scale)

    return apply


def measured_row(
    network: str, way: str, sizes: dict[str, Any], optimizer: str = "SGD"
) -> Row:
    """Measure a step in this process.

    Args:
        network: a name in `benchmarks.networks.ALL_NETWORKS`.
        way: one of `WAYS`.
        sizes: arguments of the network.
        optimizer: one of `OPTIMIZERS`.
    """
    import tensorflow as tf

    from benchmarks.networks import ALL_NETWORKS
    from geutil.gradients import Budget, gradients, last_report
    from geutil.memory import predict, worst_case

    gpus = tf.config.list_logical_devices("GPU")
    device = "GPU:0" if gpus else "CPU:0"
    step = ALL_NETWORKS[network](**sizes)
    checkpoints, _, rest_of_way = way.partition(", ")
    kept = Budget(checkpoints) if checkpoints.endswith("%") else checkpoints
    apply = _updates(optimizer, step.variables)
    # On one device nothing is let go by sending it to the same.
    offload = rest_of_way == "offload" and bool(gpus)

    @tf.function(autograph=False)
    def run(*batch: Any) -> Any:
        loss = step.loss(*batch)
        if way == "plain":
            slopes = tf.gradients(loss, step.variables)
        else:
            slopes = gradients(loss, step.variables, checkpoints=kept, offload=offload)
        for variable, slope in zip(step.variables, slopes, strict=True):
            apply(variable, tf.convert_to_tensor(slope))
        return loss

    function = run.get_concrete_function(*step.specs)
    graph = function.graph
    fetches = [*graph.outputs, *graph.control_outputs]
    predicted = predict(fetches)
    chunks = predicted.resident or predicted.peak
    report = None if way == "plain" else last_report(function)
    worst = max((report.worst if report else None) or 0, worst_case(fetches).peak)
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
        chunks,
        (report.resident if report else None) or chunks,
        worst,
        report.offloaded_bytes if report else 0,
        peaks[0],
        max(peaks[1:]),
        statistics.median(seconds[1:]),
        report.attempts if report else 1,
    )


def row_in_a_child(
    network: str, way: str, sizes: dict[str, Any], optimizer: str = "SGD"
) -> Row:
    """Measure a step in a process of its own; see `measured_row`.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    what = json.dumps([network, way, sizes, optimizer])
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


_TITLES = (
    "step",
    "measured MB",
    "report MB",
    "measured / report",
    "worst MB",
    "first call MB",
    "first / report",
    "buffers MB",
    "chunks MB",
    "away MB",
    "plans",
    "ms",
    "on",
)


def _cells(row: Row) -> list[str]:
    amounts = row.buffers, row.chunks, row.away
    return [
        f"{row.measured / _MEGA:,.1f}",
        f"{row.reported / _MEGA:,.1f}",
        f"{row.measured / row.reported:.2f}",
        f"{row.worst / _MEGA:,.1f}",
        f"{row.first / _MEGA:,.1f}",
        f"{row.first / row.reported:.2f}",
        *(f"{amount / _MEGA:,.1f}" for amount in amounts),
        str(row.plans),
        f"{1000 * row.seconds:,.1f}",
        row.device,
    ]


def _surroundings() -> str | None:
    """Return the card and the versions in words; None without a card."""
    import tensorflow as tf

    # This takes no memory of it, unlike starting it.
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    card = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    build = tf.sysconfig.get_build_info()
    versions = ", ".join(
        f"{name} {build[key]}"
        for name, key in (("CUDA", "cuda_version"), ("cuDNN", "cudnn_version"))
        if key in build
    )
    return f"{card}, TensorFlow {tf.__version__}, built for {versions or 'no CUDA'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", action="append", choices=list(SIZES))
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    parser.add_argument(
        "--batch", type=int, help="another batch than the network's own"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run small steps, without a GPU as well"
    )
    parser.add_argument(_ONE_ROW, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row is not None:
        row = measured_row(*json.loads(asked.row))
        sys.stdout.write(json.dumps(asdict(row)) + "\n")
        return
    card = _surroundings()
    if card is None and not asked.dry_run:
        print("There is no GPU: nothing is measured (--dry-run runs small steps).")
        return
    print(f"{card or 'No GPU, small steps on the CPU'}\n")
    print(f"| {' | '.join(_TITLES)} |")
    print("|---" * len(_TITLES) + "|")
    for network in asked.network or SIZES:
        sizes = dict((_SMALL if asked.dry_run else SIZES)[network])
        if asked.batch is not None and network != "chain":
            sizes["batch"] = asked.batch
        for optimizer in asked.optimizer or OPTIMIZERS:
            for way in asked.way or WAYS:
                try:
                    cells = _cells(row_in_a_child(network, way, sizes, optimizer))
                except RuntimeError as error:
                    cells = [str(error)]
                # One by one: a row that fails costs no other.
                line = [f"{network}, {optimizer}, {way}", *cells]
                print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
