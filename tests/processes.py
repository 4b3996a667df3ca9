"""Runs Python in processes of their own, for what is fixed when TensorFlow starts."""

import atexit
import contextlib
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import thorough

ROOT = Path(__file__).parents[1]
_READ_AT_THE_START = ("PYTHONHASHSEED", "TF_ENABLE_ONEDNN_OPTS")
"""What a process that has imported TensorFlow no longer heeds."""


class _Server:
    """Gives each request a process that has imported TensorFlow and done no more.

    TensorFlow takes seconds to import; a server does it once, and forks.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("PYTHONPATH", None)
        # Strings have other hashes than here, and sets another order.
        here = os.environ.get("PYTHONHASHSEED")
        environment["PYTHONHASHSEED"] = "1" if here != "1" else "2"
        # As a file it would find tests/select for the module of that name.
        code = Path(__file__).with_name("process_server.py").read_text()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=environment,
        )
        atexit.register(self.close)

    def ask(
        self, arguments: list[str], folder: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            request = (arguments, str(folder), environment, (out.name, err.name))
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            code = pickle.load(self.process.stdout)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@functools.cache
def _server() -> _Server:
    return _Server()


def run_python(
    *arguments: str | Path,
    folder: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[bytes]:
    """Run `python` with `-c` or `-m` where TensorFlow is imported already.

    What must come before that needs a process without such a start: that is what it
    gets if a variable differs that TensorFlow or Python read as they start.
    """
    listed = [str(argument) for argument in arguments]
    variables = dict(environment)
    if any(variables.get(n) != os.environ.get(n) for n in _READ_AT_THE_START):
        return subprocess.run(
            [sys.executable, *listed],
            cwd=folder,
            env=variables,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    return _server().ask(listed, folder, variables)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Let the server fork the processes of Python that `subprocess.run` would start.

    Those that have a limit of time are started. A cluster that is measured forks its
    workers.
    """
    start = subprocess.run

    def run(command: Any, **options: Any) -> Any:
        known = {"check", "capture_output", "env", "text", "timeout"}
        if (
            command[:2] != [sys.executable, "-m"]
            or not options.keys() <= known
            or options.get("timeout") is not None
        ):
            return start(command, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "run", start)
            environment = options.get("env", os.environ)
            done: Any = run_python(
                *command[1:], folder=Path.cwd(), environment=environment
            )
        if options.get("text"):
            done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        cluster = "tests.distribute.forked_cluster"
        patch.setattr("geutil.memory.measurement._CLUSTER", cluster)
        yield


def check_in_a_process(
    paths: Iterable[str | Path], variables: Mapping[str, str]
) -> None:
    """Run the tests of some files or folders, with environment variables; all pass.

    Where thorough tests are left out, they are left out there, too.
    """
    command = ["-m", "pytest", *map(str, paths)]
    if thorough.is_quick():
        command += ["-m", thorough.QUICK]
    environment = {
        name: value
        for name, value in os.environ.items()
        # A worker of pytest-xdist would take the child for another worker.
        if not name.startswith("PYTEST_")
    }
    done = run_python(
        *command,
        "-q",
        "-p",
        "no:cacheprovider",
        environment=environment | {"TF_CPP_MIN_LOG_LEVEL": "3"} | dict(variables),
    )
    printed = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, printed
    assert " passed" in printed
