"""`zoo.running.run` with processes that are forked from this one.

Those that it starts take seconds to import TensorFlow. Called with the name of a
model, the folder of the row, and journeys.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf  # noqa: F401

from zoo import running


def be(arguments: list[str], given: int, log: int, environment: dict[str, str]) -> None:
    """Be `python -m` with arguments."""
    for descriptor, file in enumerate((given, log, log)):
        os.dup2(file, descriptor)
    os.closerange(3, 1024)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class Forked:
    """A fork of this process, which has only imported TensorFlow, for a `Popen`."""

    def __init__(
        self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any
    ) -> None:
        assert command[:2] == [sys.executable, "-m"]
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        arguments = (command[2:], read, stdout.fileno(), env)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=be, args=arguments)
        self._process.start()
        os.close(read)
        self.kill, self.wait = self._process.kill, self._process.join

    def poll(self) -> int | None:
        return self._process.exitcode


if __name__ == "__main__":
    assert "geutil" not in sys.modules
    running.subprocess.Popen = Forked
    name, folder, *journeys = sys.argv[1:]
    running.run(name, journeys, Path(folder))
