"""`geutil.memory.measurement.cluster` with workers that are forked.

They are from before this process uses TensorFlow.
"""

import pickle
import signal
import sys
from pathlib import Path

from geutil.memory.measurement import cluster
from tests.distribute.programs import LIMIT
from tests.forking import Forked, with_popen


def started(command, **_):
    """Return the worker that a command would start."""
    return waiting.pop().told(command, {})


if __name__ == "__main__":
    signal.alarm(LIMIT)
    job, _ = pickle.loads(Path(sys.argv[1]).read_bytes())
    waiting = [Forked() for _ in range(cluster._TRIES * len(job.tasks))]
    cluster.subprocess = with_popen(started)
    cluster.main(*sys.argv[1:])
