"""The measuring process of a graph on several tasks: `python -m ... .cluster`.

It starts a process for each task, on free ports of this machine, and is their client.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO, cast

from geutil.errors import MeasurementError
from geutil.memory.measuring import worker
from geutil.memory.measuring.child import (
    SessionStep,
    environment_of,
    has_compiled_calls,
    initial_values,
    session_config,
    sizes_of,
    timed,
)
from geutil.memory.measuring.job import (
    DeviceMeasurement,
    GraphJob,
    Measurement,
    MeasureOptions,
)
from geutil.memory.measuring.trace import timelines_by_device
from geutil.memory.measuring.worker import READY, Setup
from geutil.memory.placement import Task, tasks_of

_MODULE = "geutil.memory.measuring.worker"
_HOST = "127.0.0.1"
_TRIES = 3
"""How often other ports are taken, should another process have been faster."""
_PATIENCE = 10.0
"""Seconds that a worker has to end by itself."""


class Worker:
    """A process that serves a task.

    Args:
        setup_path: the file of the cluster.
        task: the job and the number of the task.
    """

    def __init__(self, setup_path: Path, task: Task) -> None:
        job, number = task
        command = [sys.executable, "-m", _MODULE, str(setup_path), job, str(number)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._requests = cast(TextIO, self._process.stdin)
        self._answers = cast(TextIO, self._process.stdout)

    def is_ready(self) -> bool:
        """Wait for its server; tell whether it started."""
        return self._heard() is not None

    def ask(self, request: str) -> list[int | None]:
        """Send a request, and return the answer.

        Raises:
            MeasurementError: the process has ended.
        """
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
        """Return what the process answers, None if it has ended."""
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
    """Start the tasks of a job; yield the target of a Session, and the workers.

    Args:
        job: the graph.
        options: how to run it.
        folder: where to put files for the workers; the caller deletes them.

    Raises:
        MeasurementError: a server does not start.
    """
    config = session_config(job, options)
    # All tasks are of this machine, and would take its GPU at once.
    config.device_count["GPU"] = 0
    for attempt in range(_TRIES):
        setup = Setup(_addresses(job.tasks), config.SerializeToString())
        path = folder / f"setup-{attempt}"
        path.write_bytes(pickle.dumps(setup))
        started = {task: Worker(path, task) for task in job.tasks}
        try:
            if all(one.is_ready() for one in started.values()):
                name, number = job.tasks[0]
                yield f"grpc://{setup.addresses[name][number]}", started
                return
        finally:
            for one in started.values():
                one.end()
    raise MeasurementError(f"no server started on {_HOST}, on {_TRIES} tries")


def run(job: GraphJob, options: MeasureOptions, folder: Path) -> Measurement:
    """Run the steps of a job on tasks of its own and measure each; once in a process.

    Raises:
        MeasurementError: a server does not start, or ends.
    """
    values = initial_values(job)
    with workers(job, options, folder) as (target, started):
        step = SessionStep(job, options, values, target)
        _tell(started, worker.START_RESIDENT)
        step()
        _tell(started, worker.START_ALLOCATOR)
        seconds = tuple(timed(step) for _ in range(options.steps))
        peaks = {task: one.ask(worker.READ) for task, one in started.items()}
        metadata = step.trace()
        step.close()
    timelines = timelines_by_device(metadata, job.op_types, sizes_of(job, values))
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
        allocator_peak=_largest([found[0] for found in peaks.values()]),
        resident_peak=_largest([found[1] for found in peaks.values()]),
        timeline=fullest.timeline,
        seconds=seconds,
        environment=environment_of(options, fullest.device),
        partly_compiled=has_compiled_calls(job),
        devices=tuple(rows),
    )


def _tell(started: dict[Task, Worker], request: str) -> None:
    for one in started.values():
        one.ask(request)


def _largest(peaks: Sequence[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None


def main(job_path: str, result_path: str) -> None:
    """Run the pickled job of one file and pickle the measurement into another."""
    job, options = pickle.loads(Path(job_path).read_bytes())
    try:
        measurement = run(job, options, Path(job_path).parent)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Python would close the Session at its end, and wait for workers that are gone.
        os._exit(1)
    Path(result_path).write_bytes(pickle.dumps(measurement))


if __name__ == "__main__":
    main(*sys.argv[1:])
