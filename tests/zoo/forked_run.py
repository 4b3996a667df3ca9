"""`zoo.running.run` with processes that are forked from this one.

Called with the name of a model, the folder of the row, and journeys.
"""

import sys
from pathlib import Path

import tensorflow as tf  # noqa: F401

from tests.forking import Forked, with_popen
from zoo import running


def started(command, *, stdout, env, **_):
    """Return the process that a command would start."""
    process = Forked(stdout).told(command, env)
    process.stdin = process.stdin.detach()
    return process


if __name__ == "__main__":
    assert "geutil" not in sys.modules
    running.subprocess = with_popen(started)
    name, folder, *journeys = sys.argv[1:]
    running.run(name, journeys, Path(folder))
