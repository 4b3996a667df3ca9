"""`python -m benchmarks.schedules.child WORK NETWORK OPTIMIZER COUNT`.

The process that builds a step and runs it: `peaks` in many Sessions, `functions` from
eager code, `times` next to other kinds of step. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import tensorflow as tf

from benchmarks.schedules import requested
from benchmarks.schedules.steps import MEMORY, ORDERED, PLAIN, Traced, traced
from geutil.memory import predict, worst_case
from geutil.memory.measurement import MeasureOptions, job_of
from geutil.memory.measurement.child import SessionStep, initial_values
from geutil.memory.measurement.trace import timeline_of

THREADS = (1, 2, 8, None)
LOADS = (0, 2)
"""How many busy loops run beside."""
_WARM_UP = 2


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep so many cores busy."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def peaks(network: str, optimizer: str, count: int) -> dict[str, Any]:
    """Return the peaks of a step, each of a Session of its own, and what was said.

    Args:
        network: a name in `SIZES`.
        optimizer: one of `OPTIMIZERS`.
        count: how many Sessions there are for each number of threads and each load.
    """
    step = traced(network, optimizer, MEMORY)
    plain, ordered = (traced(network, optimizer, how) for how in (PLAIN, ORDERED))
    worst = worst_case(step.fetches)
    sessions = []
    for loops in LOADS:
        with busy(loops):
            for threads in THREADS:
                sessions += session_peaks(step, threads, count)
    called = [p for n in (1, None) for p in _functions(network, optimizer, count, n)]
    return {
        "report": step.report.peak,
        "report_plain": step.report.plain_peak,
        "predicted": predict(step.fetches).peak,
        "worst": worst.peak,
        "worst_reached": worst.reached,
        "plain_worst": worst_case(plain.fetches).peak,
        "sessions": sessions,
        "functions": [asked for asked, _ in called],
        "chunks": [counted for _, counted in called],
        "plain": session_peaks(plain, 1, 1)[0],
        "ordered": max(session_peaks(ordered, None, 2)),
        "ordered_report": ordered.report.peak,
    }


def session_peaks(step: Traced, threads: int | None, count: int) -> list[int]:
    """Return the peak of a traced step in each of some Sessions."""
    job, _ = job_of(step.function, step.step.tensors(), {}, None, False)
    values = initial_values(job)
    found = []
    for _ in range(count):
        options = MeasureOptions(1, threads, None, True, None, False, None)
        run = SessionStep(job, options, values)
        run()
        timeline = timeline_of(run.trace(), job.op_types, "CPU:0", variable_bytes=0)
        found.append(0 if timeline is None else timeline.peak)
        run._session.close()
    return found


def functions(network: str, optimizer: str, count: int) -> list[list[int]]:
    """Return the peaks of a step that eager code calls.

    Returns:
        For each call, on an idle machine and on a busy one: by the bytes that were
        asked for, and by the chunks that the allocator gave for them.
    """
    step = traced(network, optimizer, MEMORY)
    batch = step.step.tensors()
    for _ in range(_WARM_UP):
        step.function(*batch)
    found = []
    for loops in LOADS:
        with busy(loops):
            for _ in range(count):
                found.append(list(requested.peaks(lambda: step.function(*batch))))
    return found


def _functions(
    network: str, optimizer: str, count: int, threads: int | None
) -> list[list[int]]:
    """Run `functions` in a process with so many threads between ops."""
    command = [sys.executable, "-m", "benchmarks.schedules.child", "functions"]
    command += [network, optimizer, str(count)]
    settings = {} if threads is None else {"TF_NUM_INTEROP_THREADS": str(threads)}
    run = subprocess.run(
        command, capture_output=True, check=True, text=True, env=os.environ | settings
    )
    found: list[list[int]] = json.loads(run.stdout.splitlines()[-1])
    return found


def times(network: str, optimizer: str, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step of each kind, in interleaved rounds."""
    steps = {
        name: traced(network, optimizer, how)
        for name, how in {
            "plain": PLAIN,
            "ordered": ORDERED,
            "unordered": {**MEMORY, "order": False},
            "memory": MEMORY,
        }.items()
    }
    batches = {name: step.step.tensors() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = perf_counter()
            step.function(*batches[name])
            tf.test.experimental.sync_devices()
            if number:
                seconds[name].append(perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    work, network, optimizer, count = sys.argv[1:]
    works: dict[str, Callable[[str, str, int], Any]] = {
        "peaks": peaks,
        "functions": functions,
        "times": times,
    }
    found = works[work](network, optimizer, int(count))
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
