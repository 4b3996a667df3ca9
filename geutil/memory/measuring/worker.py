"""A task of a cluster that is measured: `python -m ... .worker SETUP JOB TASK`.

It serves until nobody holds its standard input open any more, so it ends with the
process that has started it, however that ends. Meters are started and read on request.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import tensorflow as tf

from geutil.memory.measuring.child import AllocatorMeter, ResidentMeter

READY = "geutil-worker "
"""Stands before each answer, and before nothing else that TensorFlow prints."""
START_RESIDENT, START_ALLOCATOR, READ = "resident", "allocator", "read"


@dataclass(frozen=True)
class Setup:
    """A cluster.

    Attributes:
        addresses: for each job the addresses of its tasks.
        config: the serialized `ConfigProto` of the servers.
    """

    addresses: dict[str, dict[int, str]]
    config: bytes


def serve(setup: Setup, job: str, task: int) -> Any:
    """Start the server of a task.

    Raises:
        tf.errors.OpError: another process has taken its port.
    """
    return tf.distribute.Server(
        tf.train.ClusterSpec(setup.addresses),
        job_name=job,
        task_index=task,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto.FromString(setup.config),
    )


def answer(requests: Iterable[str], answers: TextIO) -> None:
    """Start and read meters, until there are no more requests."""
    resident: ResidentMeter | None = None
    allocator: AllocatorMeter | None = None
    _say(answers, [])
    for request in requests:
        found: list[int | None] = []
        if request.strip() == START_RESIDENT:
            resident = ResidentMeter()
        elif request.strip() == START_ALLOCATOR:
            allocator = AllocatorMeter("CPU:0")
        else:
            found = [m.read() if m else None for m in (allocator, resident)]
        _say(answers, found)


def _say(answers: TextIO, found: list[int | None]) -> None:
    answers.write(f"{READY}{json.dumps(found)}\n")
    answers.flush()


def main(setup_path: str, job: str, task: str) -> None:
    """Serve a task of the pickled setup of a file."""
    setup: Setup = pickle.loads(Path(setup_path).read_bytes())
    server = serve(setup, job, int(task))
    answer(sys.stdin, sys.stdout)
    # A server of TensorFlow cannot be stopped.
    del server
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
