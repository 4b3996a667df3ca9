"""Runs tests in a process of their own, for what TensorFlow fixes when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import thorough

ROOT = Path(__file__).parents[1]


def check_in_a_process(
    paths: Iterable[str | Path], variables: Mapping[str, str]
) -> None:
    """Run the tests of some files or folders, with environment variables; all pass.

    Where thorough tests are left out, they are left out there, too.
    """
    command = [sys.executable, "-m", "pytest", *map(str, paths)]
    if thorough.is_quick():
        command += ["-m", thorough.QUICK]
    environment = {
        name: value
        for name, value in os.environ.items()
        # A worker of pytest-xdist would take the child for another worker.
        if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment | {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
