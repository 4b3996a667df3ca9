"""Runs lines of a shell in which `geutil` is this process.

A command starts TensorFlow, which takes seconds. Pages have many commands, so the one
on the path of this shell hands its arguments to this process, which runs them and hands
back what was printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_CLIENT = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = {{"arguments": sys.argv[1:], "folder": os.getcwd()}}
    server.sendall(json.dumps(asked).encode() + b"\\n")
    with server.makefile("rb") as file:
        said = json.loads(file.read())
sys.stdout.write(said["out"])
sys.stderr.write(said["err"])
sys.exit(said["code"])
"""


class Shell:
    """A shell with `geutil` on its path; each line is run by one of its own."""

    def __enter__(self) -> Shell:
        self._folder = tempfile.TemporaryDirectory(prefix="shell")
        folder = Path(self._folder.name)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / "socket"))
        self._server.listen()
        client = folder / "geutil"
        client.write_text(
            _CLIENT.format(python=sys.executable, address=str(folder / "socket"))
        )
        client.chmod(0o755)
        # Ours before the installed one; and the Python that runs the tests.
        places = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._path = os.pathsep.join(places)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._folder.cleanup()

    def run(self, line: str) -> tuple[str, int]:
        """Run a line; return what it printed, errors too, and its exit code."""
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", line],
                env=os.environ | {"PATH": self._path},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            while process.poll() is None:
                if select.select([self._server], [], [], 0.02)[0]:
                    self._answer()
            printed.seek(0)
            return printed.read().decode(), process.returncode

    def _answer(self) -> None:
        connection, _ = self._server.accept()
        with connection, connection.makefile("rb") as file:
            said = _run(**json.loads(file.readline()))
            # Who reads a pipe may have seen enough.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(json.dumps(said).encode())


def _run(arguments: list[str], folder: str) -> dict[str, Any]:
    """Run the command in this process, in a folder."""
    from geutil.cli.commands import app
    from geutil.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    back = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(app, arguments)
    finally:
        os.chdir(back)
    return {"out": out.getvalue(), "err": err.getvalue(), "code": code}


def sessions(block: str) -> list[tuple[str, str]]:
    """Split a block into lines to run, which begin with `$ `, and what they print.

    A line that ends with a backslash goes on in the next one.
    """
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in block.splitlines():
        if goes_on:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        elif line.startswith("$ "):
            found.append((line.removeprefix("$ "), ""))
        else:
            assert found, f"the block begins with '{line}', not with '$ '"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        goes_on = goes_on or line.startswith("$ ")
        goes_on = goes_on and line.endswith("\\")
    return found


def asks_for_the_code(line: str) -> bool:
    """Tell whether a line prints the exit code of the line before."""
    return shlex.split(line) == ["echo", "$?"]
