"""`geutil.memory.measuring.cluster` with workers that are forked.

Those that it starts take seconds to import TensorFlow.
"""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from geutil.memory.measuring import cluster, worker
from tests.distribute.programs import LIMIT


def serve(requests, answers):
    """Be a worker, with the arguments of the first request."""
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    # Pipes of other workers among them.
    os.closerange(3, 1024)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    if arguments := sys.stdin.readline().split():
        worker.main(*arguments)


class Forked:
    """A worker from before this process used TensorFlow, in the place of a `Popen`."""

    def __init__(self):
        (requests, write), (read, answers) = os.pipe(), os.pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=serve, args=(requests, answers))
        self._process.start()
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(write, "w"), os.fdopen(read)

    def told(self, arguments):
        self.stdin.write(" ".join(arguments) + "\n")
        self.stdin.flush()
        return self

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def started(command, **_):
    """Return the worker that a command would start."""
    *python, module, setup, job, task = command
    assert (python, module) == ([sys.executable, "-m"], cluster._MODULE)
    return waiting.pop().told([setup, job, task])


if __name__ == "__main__":
    signal.alarm(LIMIT)
    job, _ = pickle.loads(Path(sys.argv[1]).read_bytes())
    waiting = [Forked() for _ in range(cluster._TRIES * len(job.tasks))]
    cluster.subprocess.Popen = started
    cluster.main(*sys.argv[1:])
