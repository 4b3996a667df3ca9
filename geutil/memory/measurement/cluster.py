"""The measuring process of a graph on several tasks: `python -m ... .cluster`.

With JOB RESULT it starts a process for each task, on free ports of this machine, and is
their client. With SETUP JOB TASK it is such a process: it serves until nobody holds its
standard input open any more, so it ends with the client, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.graph.runtime import Task, tasks_of
from geutil.memory.measurement import GraphJob, MeasureOptions, child
from geutil.memory.measurement.trace import timelines_by_device
from geutil.memory.timeline import DeviceMeasurement, Measurement

READY = "geutil-worker "
"""Stands before each answer, and before nothing else that TensorFlow prints."""
START_RESIDENT, START_ALLOCATOR, READ = "resident", "allocator", "read"
_MODULE = "geutil.memory.measurement.cluster"
_HOST = "127.0.0.1"
_TRIES = 3
"""How often other ports are taken, should another process have been faster."""
_PATIENCE = 10.0
"""Seconds that a worker has to end by itself."""


class Worker:
    """A process that serves a task, set up by a file."""

    def __init__(self, setup_path: Path, task: Task) -> None:
        job, number = task
        command = [sys.executable, "-m", _MODULE, str(setup_path), job, str(number)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._requests = cast(TextIO, self._process.stdin)
        self._answers = cast(TextIO, self._process.stdout)

    def is_ready(self) -> bool:
        """Wait for its server; return whether it started."""
        return self._heard() is not None

    def ask(self, request: str) -> list[int | None]:
        """Send a request, and return the answer; raise if the process has ended."""
        heard = None
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(f"{request}\n")
            self._requests.flush()
            heard = self._heard()
        if heard is None:
            raise MeasurementError(
                f"a worker ended with status {self._process.wait()} while it was "
                "measured"
            )
        found: list[int | None] = json.loads(heard)
        return found

    def end(self) -> None:
        """End the process, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _heard(self) -> str | None:
        """Return the answer of the process, None if it has ended."""
        for line in self._answers:
            if line.startswith(READY):
                return line.removeprefix(READY)
        return None


def _addresses(tasks: Sequence[Task]) -> dict[str, dict[int, str]]:
    """Return an address of this machine for each task, by job."""
    addresses: dict[str, dict[int, str]] = {}
    with contextlib.ExitStack() as stack:
        for job, number in tasks:
            # All are open at once, so that no port is given twice.
            opened = stack.enter_context(socket.socket())
            opened.bind((_HOST, 0))
            address = f"{_HOST}:{opened.getsockname()[1]}"
            addresses.setdefault(job, {})[number] = address
    return addresses


@contextlib.contextmanager
def workers(
    job: GraphJob, options: MeasureOptions, folder: Path
) -> Iterator[tuple[str, dict[Task, Worker]]]:
    """Start the tasks of a job; yield the target of a Session, and the workers."""
    config = child.session_config(job, options)
    # All tasks are of this machine, and would take its GPU at once.
    config.device_count["GPU"] = 0
    for attempt in range(_TRIES):
        addresses = _addresses(job.tasks)
        path = folder / f"setup-{attempt}"
        path.write_bytes(pickle.dumps((addresses, config.SerializeToString())))
        started = {task: Worker(path, task) for task in job.tasks}
        try:
            if all(one.is_ready() for one in started.values()):
                name, number = job.tasks[0]
                yield f"grpc://{addresses[name][number]}", started
                return
        finally:
            for one in started.values():
                one.end()
    raise MeasurementError(f"no server started on {_HOST}, on {_TRIES} tries")


def run(job: GraphJob, options: MeasureOptions, folder: Path) -> Measurement:
    """Measure the steps of a job on tasks of its own; once in a process."""
    values = child.initial_values(job)
    with workers(job, options, folder) as (target, started):
        step = child.SessionStep(job, options, values, target)
        _tell(started, START_RESIDENT)
        step()
        _tell(started, START_ALLOCATOR)
        seconds = tuple(child.timed(step) for _ in range(options.steps))
        peaks = {task: one.ask(READ) for task, one in started.items()}
        metadata = step.trace()
        step.close()
    timelines = timelines_by_device(metadata, job.op_types, child.sizes_of(job, values))
    several = [tasks_of([name])[0] for name in timelines]
    rows = []
    for name, timeline in timelines.items():
        task = tasks_of([name])[0]
        # The process' own figures say nothing of one of its devices.
        allocator, resident = peaks[task] if several.count(task) == 1 else (None, None)
        rows.append(
            DeviceMeasurement(name, timeline.peak, allocator, resident, timeline)
        )
    fullest = max(rows, key=lambda row: row.trace_peak or 0)
    return Measurement(
        trace_peak=fullest.trace_peak,
        allocator_peak=_largest(found[0] for found in peaks.values()),
        resident_peak=_largest(found[1] for found in peaks.values()),
        timeline=fullest.timeline,
        seconds=seconds,
        environment=child.environment_of(options, fullest.device),
        partly_compiled=child.has_compiled_calls(job),
        devices=tuple(rows),
    )


def _tell(started: dict[Task, Worker], request: str) -> None:
    for one in started.values():
        one.ask(request)


def _largest(peaks: Iterable[int | None]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def serve(setup_path: Path, job: str, task: int) -> Any:
    """Start the server of a task of the pickled (addresses, config) of a file."""
    addresses, config = pickle.loads(setup_path.read_bytes())
    return tf.distribute.Server(
        tf.train.ClusterSpec(addresses),
        job_name=job,
        task_index=task,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto.FromString(config),
    )


def answer(requests: Iterable[str], answers: TextIO) -> None:
    """Start and read meters, until there are no more requests."""
    meters: dict[str, child.Meter] = {}
    _say(answers, [])
    for request in map(str.strip, requests):
        found: list[int | None] = []
        if request == START_RESIDENT:
            meters[request] = child.resident_meter()
        elif request == START_ALLOCATOR:
            meters[request] = child.allocator_meter("CPU:0")
        else:
            for name in (START_ALLOCATOR, START_RESIDENT):
                found.append(meters[name]() if name in meters else None)
        _say(answers, found)


def _say(answers: TextIO, found: list[int | None]) -> None:
    answers.write(f"{READY}{json.dumps(found)}\n")
    answers.flush()


def main(path: str, *rest: str) -> None:
    """Measure the pickled job of one file into another, or serve a task; see above."""
    if len(rest) > 1:
        server = serve(Path(path), rest[0], int(rest[1]))
        answer(sys.stdin, sys.stdout)
        # A server of TensorFlow cannot be stopped.
        del server
        os._exit(0)
    job, options = pickle.loads(Path(path).read_bytes())
    try:
        measurement = run(job, options, Path(path).parent)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Python would close the Session at its end, and wait for workers that are gone.
        os._exit(1)
    Path(rest[0]).write_bytes(pickle.dumps(measurement))


if __name__ == "__main__":
    main(*sys.argv[1:])
