"""Forks of a process that has imported TensorFlow, which takes seconds, unused."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any


def _become(given: int, output: int, error: int) -> None:
    """Be `python -m` with the arguments and variables of the first line that comes."""
    for descriptor, file in enumerate((given, output, error)):
        os.dup2(file, descriptor)
    # Pipes of other forks among them.
    os.closerange(3, 1024)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    if line := sys.stdin.readline():
        arguments, environment = json.loads(line)
        os.environ.update(environment)
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class Forked:
    """A fork that waits for a command; its output goes to a pipe, or `output`."""

    def __init__(self, output: Any = None) -> None:
        (given, write), (read, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "w"), os.fdopen(read)
        written = answers if output is None else output.fileno()
        files = given, written, 2 if output is None else written
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_become, args=files)
        self._process.start()
        os.close(given)
        os.close(answers)
        self.kill = self._process.kill

    def told(self, command: list[str], environment: dict[str, str]) -> "Forked":
        assert command[:2] == [sys.executable, "-m"]
        print(json.dumps([command[2:], environment]), file=self.stdin, flush=True)
        return self

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


def with_popen(start: Callable[..., Any]) -> Any:
    """Return the module `subprocess` with a `Popen` for one module that uses it."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
